"""OpenAI's own client for Python."""

import json

import openai
import pydantic
from checks import MODEL, QUESTION, URL, WORD, check

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
MESSAGES = [{"role": "user", "content": QUESTION}]
TIMER_QUESTION = "Set a timer for 45 minutes."
PARAMETERS = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
FUNCTION = {"name": "set_timer", "description": "Set a timer in minutes.", "parameters": PARAMETERS}
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}


@check("models")
def _():
    names = [model.id for model in client.models.list()]
    assert MODEL in names
    assert client.models.retrieve(MODEL).id == MODEL
    return ", ".join(names)


@check("chat")
def _():
    answer = client.chat.completions.create(**CHAT)
    assert WORD in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check("streamed chat with usage")
def _():
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert WORD in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


@check("log-probabilities")
def _():
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    numbers = answer.choices[0].logprobs.content
    assert len(numbers) == answer.usage.completion_tokens
    assert all(len(number.top_logprobs) == 3 for number in numbers)


@check("several choices")
def _():
    answer = client.chat.completions.create(**CHAT | {"temperature": 1, "seed": 3}, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@check("tool call and its result")
def _():
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": TIMER_QUESTION}]
    answer = client.chat.completions.create(**CHAT | {"messages": messages, "max_tokens": 160}, tools=tools)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"minutes": 45}
    result = {"role": "tool", "tool_call_id": call.id, "content": "started"}
    messages = [*messages, answer.choices[0].message, result]
    again = client.chat.completions.create(**CHAT | {"messages": messages}, tools=tools)
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")


class City(pydantic.BaseModel):
    name: str
    is_capital: bool


@check("chat by a schema, parsed")
def _():
    answer = client.chat.completions.parse(**CHAT | {"max_tokens": 200}, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


@check("a forced call")
def _():
    tools = [{"type": "function", "function": FUNCTION}]
    answer = client.chat.completions.create(**CHAT | {"max_tokens": 200}, tools=tools, tool_choice="required")
    assert "minutes" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


@check("text completion with echo")
def _():
    answer = client.completions.create(
        model=MODEL, prompt="One two three", max_tokens=4, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith("One two three")
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens


@check("response")
def _():
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=60)
    assert WORD in answer.output_text
    assert answer.status in ("completed", "incomplete")


@check("streamed response")
def _():
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert WORD in final.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@check("response by a schema, parsed")
def _():
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, temperature=0)
    assert isinstance(answer.output_parsed, City)


@check("response with a function call")
def _():
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    answer = client.responses.create(model=MODEL, input=TIMER_QUESTION, tools=tools, temperature=0)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"minutes": 45}
    items = [{"role": "user", "content": TIMER_QUESTION}, *answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "started"})
    assert client.responses.create(model=MODEL, input=items, tools=tools).status


@check("failures are its own classes")
def _():
    for fields, kind in (
        ({"temperature": 9}, openai.BadRequestError),
        ({"model": "x"}, openai.NotFoundError),
    ):
        try:
            client.chat.completions.create(**CHAT | fields)
        except kind:
            continue
        raise AssertionError(f"{fields} raised no {kind.__name__}")
