"""Templates that would never end, or would fill memory: they are refused within their budget."""

import itertools

import pytest

from dflash_core.errors import CheckpointError, InvalidRequest
from dflash_core.text.sandbox import Budget
from dflash_core.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(source: str, *, ticks: float = 20_000, messages: list[dict[str, str]] = MESSAGES) -> str:
    """Render by a clock that goes on by one whenever it is looked at."""
    clock = itertools.count()
    return ChatTemplate({"default": source}, {}).render(
        messages, None, True, {}, Budget(ticks, lambda: float(next(clock)))
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
        "{{ range(99999)|map('string')|map('upper')|map('lower')|list|length }}",
    ],
)
def test_a_template_that_does_not_end_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)


DOUBLED = "{% set n = namespace(s=START) %}{% for i in range(64) %}{% set n.s = NEXT %}{% endfor %}{{ n.s }}"


def doubled(start: str, following: str) -> str:
    return DOUBLED.replace("START", start).replace("NEXT", following)


@pytest.mark.parametrize(
    "source",
    [
        doubled("'ab'", "n.s ~ n.s"),
        doubled("'ab'", "n.s + n.s"),
        doubled("[1]", "n.s + n.s"),
        doubled("9", "n.s * n.s"),
        doubled("'a' * 4096", "n.s|replace('a', n.s)"),
        doubled("'a' * 4096", "n.s.replace('a', n.s)"),
        "{% set s = 'a' * 99999 %}{% for i in range(9999) %}{{ s }}{% endfor %}",
        "{% set s = 'a' * 99999 %}{{ range(99999)|join(s) }}",
        "{% set s = 'a' * 99999 %}{{ range(99999)|map('string')|join(s) }}",
        "{% set s = 'a' * 99999 %}{{ s.join(range(99999)|map('string')) }}",
        "{{ 'a' * 9999999999 }}",
        "{{ 9999999999 * 'a' }}",
        "{{ [0] * 9999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'a'|center(9999999999) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d'|format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ messages|tojson(indent=9999999999) }}",
        "{{ ('a\n' * 9999)|indent(9999999999) }}",
        "{{ lipsum(9999999999) }}",
    ],
)
def test_a_template_that_makes_too_much_is_refused_before_it_is_made(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source, ticks=10**9)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '(' * 3 }" + "(" * 5000,
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{% for i in x %}" * 50 + "{% endfor %}" * 50,
        "{% if x %}" * 600 + "{% endif %}" * 600,
        "a" * (2**20 + 1),
    ],
)
def test_a_template_that_no_compiler_takes_is_a_checkpoint_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate({"default": source}, {})


def test_what_templates_do_every_day_is_left_as_it_was() -> None:
    source = (
        "{%- macro said(m) -%}{{ m.role|upper ~ ': ' ~ m.content|trim }}{%- endmacro -%}"
        "{%- for m in messages -%}{{ loop.index0 }}/{{ loop.length }} {{ said(m) }}"
        "{%- if not loop.last %}{{ '|' }}{% endif -%}{%- endfor -%}"
        "{{ ' %s-%05d ' % ('a', 3) }}{{ 'x' * 3 }}{{ 'a,b'.split(',')|join(';') }}"
        "{{ '{}={:.2f}'.format('t', 1.5) }}"
        "{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ 'a-b'.replace('-', '+') }}{{ {'a': 1}|tojson(indent=1) }}"
        "{{ 'a'|center(3) }}{{ 1700000000|default(2) }}{{ messages|map(attribute='content')|list }}"
    )
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yo"}]
    assert render(source, messages=messages) == (
        "0/2 USER: Hi|1/2 ASSISTANT: Yo a-00003 xxxa;bt=1.50102" + '43[1, 2]a+b{\n "a": 1\n} a 1700000000'
        "[' Hi ', 'Yo']"
    )
