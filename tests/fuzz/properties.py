"""Every check by name, with its inputs."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck
from hypothesis import strategies as st

from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.mlx_messages import pb as mlx
from dflash_core.pair import DRAFTER, TARGET
from tests.fuzz import checkpoint_checks, files, job_checks, mutations, strategies, wire_checks
from tests.fuzz.messages import proto
from tests.fuzz.templates import templates

Check = Callable[[Any], None]
# Large inputs and slow checks are meant.
UNHURRIED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


@dataclass(frozen=True, slots=True)
class Property:
    """An input's strategy, and its check."""

    inputs: strategies.Strategy
    check: Check


def _bytes(*seeds: bytes) -> strategies.Strategy:
    return st.binary(max_size=200) | st.sampled_from(seeds).flatmap(mutations.spoiled)


LINE = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}}'
RESULT = (
    b'{"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}\n'
)
_CHAT = b'\x00{"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}], "stop": ["a"]}'
_RESPONSES = b'\x04{"model": "stub-model", "input": "Hi", "max_output_tokens": 5}'
_PROMPT = b'\x01{"model": "stub-model", "prompt": [5, 6], "max_tokens": 5, "logit_bias": {"5": 1}}'
_WEIGHTS = (
    b"\x40\x00\x00\x00\x00\x00\x00\x00"
    + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64)
    + b"abcd"
)
_CONFIG = b'{"model_type": "qwen3_5", "rope_theta": 1e4, "layer_types": ["full_attention"]}'


def seeds() -> Mapping[str, tuple[bytes, ...]]:
    """Good inputs of the checks that take bytes, for a fuzzer to start from."""
    wire = pb.GenerateRequest(
        spec=pb.GenerationSpec(
            model="stub-model",
            max_tokens=5,
            chat=pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content="Hi")]),
        )
    ).SerializeToString()
    smgs = mlx.GenerateRequest(request_id="a", tokenized=mlx.TokenizedInput(input_ids=[1, 2]))
    return {
        "http_bytes": (_CHAT, _PROMPT, b'\x02{"prompt": "Hi"}', b'\x03{"tokens": [5]}', _RESPONSES),
        "grpc_bytes": (b"\x00" + wire, b"\x01" + wire, b"\x02" + smgs.SerializeToString()),
        "batch_line": (LINE,),
        "batch_result": (RESULT,),
        "prompts": (LINE,),
        "json_file": (_CONFIG,),
        "safetensors_bytes": (_WEIGHTS,),
    }


def properties() -> Mapping[str, Property]:
    """All of them."""
    found = _of_bytes() | _of_the_wire() | _of_files()
    return {check.__name__: Property(inputs, check) for check, inputs in found.items()}


def _of_bytes() -> dict[Check, strategies.Strategy]:
    checks = (
        wire_checks.http_bytes,
        wire_checks.grpc_bytes,
        job_checks.batch_line,
        job_checks.batch_result,
        job_checks.prompts,
        checkpoint_checks.json_file,
        checkpoint_checks.safetensors_bytes,
    )
    known = seeds()
    return {check: _bytes(*known[check.__name__]) for check in checks}


def _of_the_wire() -> dict[Check, strategies.Strategy]:
    messages = st.one_of(
        st.tuples(st.just("Generate"), proto(pb.GenerateRequest)),
        st.tuples(st.just("GenerateOnce"), proto(pb.GenerateOnceRequest)),
        st.tuples(st.just("Smg"), proto(mlx.GenerateRequest)),
    )
    return {
        wire_checks.http_document: strategies.http,
        wire_checks.http_head: st.tuples(
            strategies.methods, strategies.paths, strategies.headers, st.booleans()
        ),
        wire_checks.grpc_message: messages,
    }


def _of_files() -> dict[Check, strategies.Strategy]:
    lines = st.lists(_bytes(LINE), max_size=4).map(b"\n".join)
    packed = lines.flatmap(lambda data: mutations.spoiled(gzip.compress(data)))
    endings = st.sampled_from(["", ".gz", ".bz2", ".xz", ".zip"])
    header = files.header(checkpoint_checks.WEIGHTS)
    index = {"metadata": {}, "weight_map": dict.fromkeys(list(header)[:9], "model.safetensors")}
    text = {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}", "model_max_length": 1e30}
    return {
        job_checks.batch_file: st.tuples(endings, lines | packed),
        checkpoint_checks.target_config: mutations.mutated(files.config(TARGET)),
        checkpoint_checks.drafter_config: mutations.mutated(files.config(DRAFTER)),
        checkpoint_checks.safetensors_header: mutations.mutated(header),
        checkpoint_checks.weight_index: mutations.mutated(index),
        checkpoint_checks.tokenizer_file: mutations.mutated(files.small_tokenizer()),
        checkpoint_checks.text_config: mutations.mutated(text),
        checkpoint_checks.template: templates,
        checkpoint_checks.conversation: st.lists(strategies.message, min_size=1, max_size=4),
    }
