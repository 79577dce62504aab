"""LiteLLM's SDK, without its proxy."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices

import litellm
from checks import MODEL, QUESTION, URL, WORD, check

litellm.telemetry = False
NAMED = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
OPENAI = NAMED | {"model": f"openai/{MODEL}"}
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}
PARAMETERS = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
FUNCTION = {"name": "set_timer", "description": "Set a timer in minutes.", "parameters": PARAMETERS}

for provider in (OPENAI, NAMED):
    name = provider["model"].partition("/")[0]

    @check(f"{name}: completion")
    def _(provider=provider):
        answer = litellm.completion(**provider, **CHAT)
        assert WORD in answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0

    @check(f"{name}: streamed")
    def _(provider=provider):
        stream = litellm.completion(**provider, **CHAT, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert WORD in litellm.stream_chunk_builder(chunks).choices[0].message.content

    @check(f"{name}: tool call")
    def _(provider=provider):
        messages = [{"role": "user", "content": "Set a timer for 45 minutes."}]
        tools = [{"type": "function", "function": FUNCTION}]
        answer = litellm.completion(**provider, messages=messages, tools=tools, temperature=0)
        assert answer.choices[0].message.tool_calls[0].function.name == "set_timer"


@check("text completion")
def _():
    model = {"model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(**OPENAI | model, prompt="One two three", max_tokens=8)
    assert answer.usage.completion_tokens == 8


@check("response")
def _():
    answer = litellm.responses(**OPENAI, input=QUESTION, temperature=0, max_output_tokens=60)
    assert WORD in answer.output[-1].content[0].text


@check("streamed response")
def _():
    stream = litellm.responses(**OPENAI, input=QUESTION, temperature=0, stream=True)
    kinds = [str(getattr(event.type, "value", event.type)) for event in stream]
    assert kinds[-1] == "response.completed", kinds


@check("failures are its own classes")
def _():
    message = ""
    try:
        litellm.completion(**OPENAI, **CHAT | {"temperature": 9})
    except litellm.BadRequestError as error:
        message = str(error)
    assert "temperature" in message
