"""A row as a request of the gRPC contract: nothing of it is left to the other side's defaults."""

from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from dflash_core.request import RowRequest


def spec_of(request: RowRequest, model: str) -> pb.GenerationSpec:
    """The row as it stands, committed tokens included; the answer is what it has still to emit.

    Stop strings stay here, where the text is made; end tokens go by number, so that nobody adds any.
    """
    continued = 0 if request.prompt_length is None else len(request.tokens) - request.prompt_length
    spec = pb.GenerationSpec(
        model=model,
        token_ids=pb.TokenIds(ids=request.tokens),
        max_tokens=request.max_tokens,
        sampling=_sampling(request),
        stopping=pb.Stopping(
            token_ids=sorted(request.stop_token_ids),
            ignore_eos=True,
            min_tokens=min(max(0, request.sampling.min_tokens - continued), request.max_tokens),
        ),
    )
    if continued:
        spec.continued = continued
    if request.grammar is not None:
        spec.structure.grammar = request.grammar
    if request.num_top_logprobs is not None:
        top, prompt = request.num_top_logprobs, request.wants_prompt_logprobs
        spec.logprobs.CopyFrom(pb.Logprobs(top=top, prompt=prompt))
    return spec


def _sampling(request: RowRequest) -> pb.Sampling:
    sampling = request.sampling
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed % 2**64,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
    )
