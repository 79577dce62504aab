"""Chat templates that do what they like."""

from hypothesis import strategies as st

_EXPRESSIONS = [
    "messages", "messages[0]", "messages[0].content", "messages|length", "'a' * 1000", "range(1000)",
    "ns.s", "ns.s ~ ns.s", "ns.s * 2", "[ns.s] * 100", "2 ** ns.n", "ns.n * ns.n", "f()", "m",
    "''.__class__", "messages.__init__", "'%9d' % 3", "'%999999999d' % 3", "'{:>99999999}'.format(3)",
    "ns.s.center(99999999)", "ns.s.replace('', ns.s)", "ns.s|join(ns.s)", "cycler", "lipsum(999999)",
    "tools|tojson(indent=9999999)", "raise_exception('x')", "strftime_now('%Y')", "self", "loop.index",
    "messages|map('upper')|list", "range(99999)|list|length", "'x'|indent(99999999)", "dict(a=1)",
    "undefined.y.z", "1 / 0",
]  # fmt: skip
_expression = st.sampled_from(_EXPRESSIONS)
_statement = st.recursive(
    _expression.map(lambda e: f"{{{{ {e} }}}}")
    | _expression.map(lambda e: f"{{% set ns.s = {e} %}}")
    | _expression.map(lambda e: f"{{% set ns.n = {e} %}}")
    | st.sampled_from(["{% break %}", "{% if %}", "{{", "%}", "{% include 'x' %}", "{% raw %}"]),
    lambda inner: st.one_of(
        st.tuples(_expression, inner).map(lambda p: f"{{% for m in {p[0]} %}}{p[1]}{{% endfor %}}"),
        st.tuples(_expression, inner).map(lambda p: f"{{% if {p[0]} %}}{p[1]}{{% endif %}}"),
        inner.map(lambda body: f"{{% macro f() %}}{body}{{% endmacro %}}"),
        st.lists(inner, max_size=3).map("".join),
    ),
    max_leaves=6,
)
templates = _statement.map(lambda body: "{% set ns = namespace(s='ab', n=3) %}" + body)
