"""OpenAI's Responses API: requests as chats, chats' answers as responses. Nothing is kept. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, ValidationError

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import MAX_CHAT_MESSAGES, MAX_TOP_LOGPROBS
from loraplex_router.http import dialects
from loraplex_router.http.errors import error_object
from loraplex_router.http.faults import fault_of
from loraplex_router.http.fields import Fields, Items
from loraplex_router.http.openai import answers
from loraplex_router.http.openai.fields import ChatCompletionRequest, StreamOptions
from loraplex_router.http.openai.requests import Job, not_a_text
from loraplex_router.http.openai.tools import parts_of
from loraplex_router.http.streaming import data_event

# Fields that need state which this server does not keep, and the values that need none.
_STATE: Final[Mapping[str, tuple[Any, ...]]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "context_management": ([],),
    "max_tool_calls": (),
    "n": (1,),
}
_LOGPROBS: Final = "message.output_text.logprobs"
_SEND_ALL: Final = "nothing is kept here: set `store` to false in the client, and send the items themselves"
_EARLIER: Final = ("previous_response_id", "conversation")  # they stand for the items of earlier answers
# Kinds of parts, and their key that has the text.
_TEXT_PARTS: Final = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}


class ResponsesRequest(Fields):
    """Body of POST /v1/responses. Other fields go to the chat that it becomes."""

    model: str | None = None
    input: str | Annotated[Items[dict[str, Any]], Field(max_length=MAX_CHAT_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: Items[str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None


# --- requests -------------------------------------------------------------------------------------------------------


# Names that a chat's fields have in a request of this route.
_NAMES: Final[Mapping[str, str]] = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
# Fields that an answer repeats as they came.
_RETURNED: Final = ("metadata", "reasoning", "text", "tools", "tool_choice", "instructions")


def chat_request(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that the request becomes. Raises InvalidArgument and Unimplemented with the field's name."""
    for name in _RETURNED:
        try:
            json.dumps(getattr(body, name), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise InvalidArgument(f"`{name}` has a number or a text that JSON cannot write", field=name) from error
    fields = body.extras()
    for name, neutral in _STATE.items():
        if name in fields and fields.pop(name) not in neutral:
            instead = _SEND_ALL if name in _EARLIER else "one answer is made, and none is kept"
            raise Unimplemented(f"`{name}` is not available: {instead}", field=name)
    own: dict[str, Any] = {"model": body.model, "stream": body.stream, "messages": list(_messages(body))}
    own["max_completion_tokens"] = body.max_output_tokens
    if _LOGPROBS in (body.include or ()) or body.top_logprobs:
        own |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    own["reasoning_effort"] = (body.reasoning or {}).get("effort") or None
    if body.truncation == "auto":
        own["truncate_prompt_tokens"] = -1
    own["verbosity"] = (body.text or {}).get("verbosity")
    if (text_format := (body.text or {}).get("format")) is not None:
        own["response_format"] = _response_format(text_format)
    own["tools"] = _functions(body) or None
    own["tool_choice"] = None if body.tool_choice is None else _tool_choice(body.tool_choice)
    for name, value in own.items():
        if value is None:
            continue
        if fields.setdefault(name, value) != value:
            raise InvalidArgument(f"`{name}` is said in another way, too: leave it out", field=name)
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise named(fault_of(error.errors(), fields), body) from error


def named(error: LoraplexError, body: ResponsesRequest) -> LoraplexError:
    """The error of the chat that the request became, with the request's own name of the field."""
    field = error.field or ""
    chats = re.split(r"\W", field, maxsplit=1)[0]
    if chats in _NAMES and chats not in body.extras():
        # Messages are other items, and have other numbers.
        error.field = _NAMES[chats] + ("" if chats == "messages" else field.removeprefix(chats))
        error.message = error.message.replace(f"`{field}`", f"`{error.field}`")
    for chats, own in _NAMES.items():  # those that it is about besides
        if chats not in body.extras():
            error.message = error.message.replace(f"`{chats}`", f"`{own}`")
    return error


def ignored_parts(body: ResponsesRequest) -> list[str]:
    """Names of what is not known, or has no effect, in the objects of options and in `include`."""
    parts = (("text", body.text, ("format", "verbosity")), ("reasoning", body.reasoning, ("effort",)))
    names = [
        f"{name}.{key}"
        for name, given, known in parts
        for key, one in (given or {}).items()
        if key not in known and one is not None
    ]
    names += dict.fromkeys(f"tools.{kind}" for _, _, tool in _tools(body) if (kind := tool.get("type")) != "function")
    return names + [f"include.{one}" for one in body.include or () if one != _LOGPROBS]


def _messages(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    # Of the assistant: what it thought, said and called is one message, for the outputs of calls come right behind it.
    turn: dict[str, Any] | None = None
    for index, item in enumerate(body.input):
        kind = item.get("type") or "message"
        where = f"input[{index}]"
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if turn is None or (kind == "message" and "content" in turn and "tool_calls" not in turn):
                if turn is not None:
                    yield turn
                turn = {"role": "assistant"}
            _add_to_turn(turn, kind, item, where)
            continue
        if turn is not None:
            yield turn
            turn = None
        if kind == "message":
            yield {"role": _text(item, "role", where), "content": _content(item.get("content"), where)}
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            yield {"role": "tool", "tool_call_id": _call_id(item, where), "content": output}
        else:
            raise Unimplemented(f"`{where}` has the type {ascii(kind)[:40]}: {_instead_of(kind)}", field=where)
    if turn is not None:
        yield turn


def _instead_of(kind: Any) -> str:
    """Advice for an item of a kind that is not available: the thing to send in its place."""
    if kind == "item_reference":
        return _SEND_ALL
    return "it is not available, send messages, reasoning and calls of functions"


def _add_to_turn(turn: dict[str, Any], kind: Any, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        turn["content"] = turn.get("content", "") + _content(item.get("content"), where)
    elif kind == "function_call":
        function = {"name": _called(item, where), "arguments": item.get("arguments")}
        call = {"id": _call_id(item, where), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        parts = item.get("content") or item.get("summary") or []
        turn["reasoning"] = turn.get("reasoning", "") + "".join(_texts(parts, where))


def _name(function: Mapping[str, Any], where: str) -> str:
    """The name of a function. Raises InvalidArgument."""
    return check_id(_text(function, "name", where) or "", field=f"{where}.name")


def _called(call: Mapping[str, Any], where: str) -> str:
    """The name that the model has for the function of a call. Raises InvalidArgument."""
    if namespace := _text(call, "namespace", where, is_needed=False) or "":
        check_id(namespace, field=f"{where}.namespace")
    return _whole_name(namespace, _name(call, where), where)


def _call_id(item: Mapping[str, Any], where: str) -> str | None:
    """The id of a call, if it has one. Raises InvalidArgument."""
    call_id = _text(item, "call_id", where, is_needed=False)
    return check_id(call_id, field=f"{where}.call_id") if call_id else call_id


def _text(given: Mapping[str, Any], name: str, where: str, *, is_needed: bool = True) -> str | None:
    """The text under `name`. Raises InvalidArgument for other values, and where it is missing but needed."""
    text, name = given.get(name), f"{where}.{name}"
    if text is None and is_needed:
        raise InvalidArgument(f"`{name}` is missing", field=name)
    if not isinstance(text, str | None):
        raise InvalidArgument(f"`{name}` must be a text", field=name)
    return text


def _content(content: Any, where: str) -> str:
    return content if isinstance(content, str) else "".join(_texts(content, where))


def _texts(parts: Any, where: str) -> Iterator[str]:
    for part in cast("list[Any]", parts if isinstance(parts, list) else [None]):
        known = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind = known.get("type")
        text = known.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise not_a_text(part, where)
        yield text


def _response_format(text_format: Any) -> Any:
    if not isinstance(text_format, dict) or (given := cast("dict[str, Any]", text_format)).get("type") != "json_schema":
        return text_format
    return {"type": "json_schema", "json_schema": {key: one for key, one in given.items() if key != "type"}}


def _tools(body: ResponsesRequest) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each tool with its place in the request and its namespace, which may be empty. Raises InvalidArgument."""
    for index, tool in enumerate(body.tools or ()):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield where, "", tool
            continue
        namespace, members = _text(tool, "name", where) or "", tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(one, dict) for one in cast("list[Any]", members)):
            raise InvalidArgument(f"`{where}.tools` must be a list of tools", field=f"{where}.tools")
        listed = cast("list[dict[str, Any]]", members)
        if any(one.get("type") == "function" for one in listed):
            check_id(namespace, field=f"{where}.name")  # of others nothing has the name
        for number, member in enumerate(listed):
            yield f"{where}.tools[{number}]", namespace, member


def _whole_name(namespace: str, name: str, where: str) -> str:
    """The name that the model has for a function of a namespace. Raises InvalidArgument for one that is too long."""
    return check_id(f"{namespace.removesuffix('__')}__{name}", field=f"{where}.name") if namespace else name


def _own_names(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Namespace and own name of functions, by the name that the model has for them, and by the own name, which models
    write as well, where no other function has it."""
    functions = [one for one in _tools(body) if one[2].get("type") == "function"]
    found = {
        _whole_name(namespace, tool["name"], where): (namespace, tool["name"])
        for where, namespace, tool in functions
        if namespace
    }
    num_named = Counter(name for _, name in {(namespace, tool["name"]) for _, namespace, tool in functions})
    return {name: (namespace, name) for namespace, name in found.values() if num_named[name] == 1} | found


def _functions(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools that are functions. Others are left out, because clients send them with every request: `ignored_parts`
    names them. Raises Unimplemented where one of those is demanded, and InvalidArgument where a function of a namespace
    has the name of another one."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, str] = {}
    for where, namespace, tool in _tools(body):
        kind = tool.get("type")
        if kind == "function":
            name = _whole_name(namespace, _name(tool, where), where)
            if namespaces.setdefault(name, namespace) != namespace:
                what = f"`{where}.name` makes a second tool that the model knows as {name}; rename one of them"
                raise InvalidArgument(what, field=f"{where}.name")
            function = {key: one for key, one in tool.items() if key != "type"} | {"name": name}
            functions.append({"type": kind, "function": function})
        elif not isinstance(kind, str):
            raise Unimplemented("`tools` takes functions, with `type`: function", field="tools")
    choice = body.tool_choice
    kind = cast("dict[str, Any]", choice).get("type") if isinstance(choice, dict) else None
    is_known = kind in (None, "function", "allowed_tools")
    if not is_known or (choice == "required" and body.tools and not functions):
        raise _no_such_choice()
    return functions


def _no_such_choice() -> Unimplemented:
    return Unimplemented(
        "`tool_choice` takes auto, none, required or a function, or functions that are allowed: this server runs no "
        "tools itself",
        field="tool_choice",
    )


def _tool_choice(choice: Any) -> Any:
    """The choice as a chat has it."""
    if not isinstance(choice, dict):
        return choice
    given = cast("dict[str, Any]", choice)
    kind = _text(given, "type", "tool_choice")
    if kind == "function":
        return _named_tool(given, "tool_choice")
    if kind == "allowed_tools":
        mode, tools = given.get("mode"), given.get("tools")
        if mode not in ("auto", "required"):
            raise InvalidArgument("`tool_choice.mode` must be auto or required", field="tool_choice.mode")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
            raise InvalidArgument("`tool_choice.tools` must be a list of tools", field="tool_choice.tools")
        if any(tool.get("type") == "namespace" for tool in cast("list[dict[str, Any]]", tools)):
            raise Unimplemented(
                "`tool_choice.tools` takes functions; name each function of a namespace by its `namespace` and `name`",
                field="tool_choice.tools",
            )
        # Others than functions are left out here as in `tools`.
        named = [
            _named_tool(tool, f"tool_choice.tools[{index}]")
            for index, tool in enumerate(cast("list[dict[str, Any]]", tools))
            if tool.get("type") == "function"
        ]
        if not named:
            raise _no_such_choice()
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return choice


def _named_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": _called(tool, where)}}


# --- answers --------------------------------------------------------------------------------------------------------


def response_of(body: ResponsesRequest, job: Job, answer: pb.GenerateResponse) -> dict[str, Any]:
    """The response object of the answer to a chat."""
    chat = answers.response_of(job, [answer])
    (choice,), (completion,) = chat["choices"], answer.completions
    output = Output(job, _own_names(body))
    for _ in output.add(parts_of(completion), _rows(choice)):
        pass
    for _ in output.close(is_cut=choice["finish_reason"] == "length"):
        pass
    return _response(body, job, output.items, choice["finish_reason"], chat)


def _rows(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [] if choice["logprobs"] is None else choice["logprobs"]["content"]


def _response(
    body: ResponsesRequest,
    job: Job,
    items: list[dict[str, Any]],
    finish_reason: str | None,
    answer: Mapping[str, Any],
) -> dict[str, Any]:
    """The response object. Without a finish reason, it has only begun."""
    is_cut = finish_reason == "length"
    sampling = job.requests[0].sampling
    return {
        "id": f"resp_{job.request_id}",
        "object": "response",
        "created_at": job.created,
        "status": "in_progress" if finish_reason is None else "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": job.model,
        "output": items,
        "parallel_tool_calls": body.extras().get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p if sampling.HasField("top_p") else 1.0,
        "truncation": body.truncation or "disabled",
        "usage": _usage(answer["usage"]) if "usage" in answer else None,
        **{name: answer[name] for name in ("system_fingerprint", "loraplex") if name in answer},
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    details: Mapping[str, Any] = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        # OpenAI's clients want both; what is kept of a prompt is not counted.
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


class Output:
    """Items of a response's output, from the parts of a chat's message, with the events that tell of them."""

    def __init__(self, job: Job, own_names: Mapping[str, tuple[str, str]]) -> None:
        """`own_names`: namespace and name of functions, by the name that the model has for them."""
        self._own_names = own_names
        self.items: list[dict[str, Any]] = []
        self._request_id = job.request_id
        self._has_reasoning = bool(job.reasoning_fields)
        self._is_open = False  # the last item
        self._rows: list[Any] = []  # logprobs of all tokens so far
        self._num_passed = 0  # number of these up to the last one of a message

    def add(self, parts: Iterable[pb.ChatDelta], logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        """Takes the next parts of the message, in their order."""
        self._rows += logprobs
        for part in parts:
            match part.WhichOneof("kind"):
                case "content":
                    # A message has the rows of its own tokens. Workers of 0.1 do not say which these are.
                    first, end = max(self._num_passed, part.first_token), part.end_token or len(self._rows)
                    rows, self._num_passed = self._rows[first:end], max(first, end)
                    yield from self._extend("message", part.content, rows)
                case "reasoning" if self._has_reasoning:
                    yield from self._extend("reasoning", part.reasoning, [])
                case "tool_call":
                    yield from self._call(part.tool_call)
                case _:
                    pass

    def close(self, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """Ends the last item. `is_cut`: the answer has no more tokens to go on with."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        at = {"item_id": item["id"], "output_index": len(self.items) - 1}
        match item["type"]:
            case "function_call":
                arguments = item["arguments"]
                yield {
                    "type": "response.function_call_arguments.done",
                    **at,
                    "name": item["name"],
                    "arguments": arguments,
                }
            case kind:
                part = item["content"][0]
                name = "output_text" if kind == "message" else "reasoning_text"
                more = {"logprobs": part["logprobs"]} if kind == "message" else {}
                yield {"type": f"response.{name}.done", **at, "content_index": 0, "text": part["text"], **more}
                yield {"type": "response.content_part.done", **at, "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _extend(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        if not (self._is_open and self.items[-1]["type"] == kind):
            if kind == "message":
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "role": "assistant", "content": [part]}
            else:
                part = {"type": "reasoning_text", "text": ""}
                item = {"type": kind, "summary": [], "content": [part]}
            yield from self._open(item, "msg" if kind == "message" else "rs", shown={"content": []})
            at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": dict(part)}
        item = self.items[-1]
        part = item["content"][0]
        part["text"] += text
        at = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        if kind == "message":
            part["logprobs"] += logprobs
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": logprobs}
        else:
            yield {"type": "response.reasoning_text.delta", **at, "delta": text}

    def _call(self, call: pb.ToolCallDelta) -> Iterator[dict[str, Any]]:
        if call.id:
            namespace, name = self._own_names.get(call.name, ("", call.name))
            item = {"type": "function_call", "call_id": call.id, "name": name, "arguments": ""}
            item |= {"namespace": namespace} if namespace else {}
            yield from self._open(item, "fc", shown={})
        if call.arguments_json:
            item = self.items[-1]
            item["arguments"] += call.arguments_json
            at = {"item_id": item["id"], "output_index": len(self.items) - 1}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": call.arguments_json}

    def _open(self, item: dict[str, Any], prefix: str, shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        item |= {"id": f"{prefix}_{self._request_id}_{len(self.items)}", "status": "in_progress"}
        self.items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item, **shown}}


class Answer(dialects.Answer[Job]):
    """The answer to a request for a response, of the answer to its chat."""

    done = b""

    def __init__(self, job: Job, body: ResponsesRequest) -> None:
        super().__init__(job)
        self._body = body
        self._chat = answers.Answer(job)
        self._output = Output(job, _own_names(body))
        self._finish_reason: str | None = None
        self._last: dict[str, Any] = {}
        self._number = -1

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
        return response_of(self._body, self.job, answers[0])

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        if self._number < 0:
            begun = _response(self._body, self.job, [], None, {})
            yield self._event({"type": "response.created", "response": begun})
            yield self._event({"type": "response.in_progress", "response": begun})
        message = pb.GenerateStreamResponse.FromString(raw)
        rows: list[dict[str, Any]] = []
        for chunk in self._chat.chunks(prompt, message):
            self._last = chunk
            for choice in cast("Iterable[dict[str, Any]]", chunk["choices"]):
                rows += _rows(choice)
                self._finish_reason = choice["finish_reason"] or self._finish_reason
        yield from map(self._event, self._output.add(message.deltas, rows))

    def end(self) -> Iterator[bytes]:
        for chunk in self._chat.end_chunks():
            self._last = chunk
        yield from map(self._event, self._output.close(is_cut=self._finish_reason == "length"))
        response = _response(self._body, self.job, self._output.items, self._finish_reason or "stop", self._last)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def error(self, error: LoraplexError) -> bytes:
        content = error_object(error)["error"]
        return self._event({"type": "error", **{name: content[name] for name in ("code", "message", "param")}})

    def _event(self, content: dict[str, Any]) -> bytes:
        self._number += 1
        return data_event({**content, "sequence_number": self._number}, content["type"])
