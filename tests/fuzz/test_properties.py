"""Every property on a few hundred fixed inputs; ``make fuzz`` tries others, for as long as one likes."""

import pytest
from hypothesis import given, settings

from deployments.rpc.status import set_failure
from tests.fuzz.edges import HttpAnswer, check_grpc, check_http, grpc_context
from tests.fuzz.properties import UNHURRIED, properties, seeds

PROPERTIES = properties()
# What one input costs decides how many fit into a suite.
FEW = {
    **dict.fromkeys(("target_config", "text_config"), 40),
    **dict.fromkeys(("grpc_message", "batch_file", "drafter_config", "tokenizer_file", "template"), 60),
    **dict.fromkeys(("weight_index", "http_document", "safetensors_header"), 60),
    "http_bytes": 100,
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_no_input_is_answered_by_anything_but_an_answer_or_a_clear_refusal(name: str) -> None:
    chosen = PROPERTIES[name]
    fixed = settings(
        max_examples=FEW.get(name, 150),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=UNHURRIED,
    )
    fixed(given(chosen.inputs)(chosen.check))()


@pytest.mark.parametrize("name", seeds())
def test_the_good_inputs_that_a_fuzzer_starts_from_are_good(name: str) -> None:
    for data in seeds()[name]:
        PROPERTIES[name].check(data)


def test_a_fault_of_ours_would_be_seen() -> None:
    for answer in (
        HttpAnswer(500, {}, b'{"error": {"message": "m", "type": "t", "param": null, "code": "c"}}'),
        HttpAnswer(422, {}, b"{}"),
        HttpAnswer(400, {}, b'{"error": {"message": "/work/a.py", "type": "t", "param": null, "code": "c"}}'),
        HttpAnswer(400, {}, b'{"error": "no"}'),
    ):
        with pytest.raises((AssertionError, AttributeError)):
            check_http(answer)
    context = grpc_context()
    set_failure(context, RuntimeError("a bug"))
    with pytest.raises(AssertionError):
        check_grpc(context)
