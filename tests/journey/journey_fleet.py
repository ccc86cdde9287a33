"""Random traffic over the real door, and whether two answers to one question are the same.

A question is one HTTP body with everything that decides its answer (seeds included), so
any fleet must answer it alike. Knows the door's wire forms; not what serves it.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from journey_server import Served

Json = dict[str, object]
ANSWER_LIMIT_S = 60.0  # of silence; keepalive comments count as silence here, see _events
LOGPROB_TOLERANCE = 1e-3  # chunks of other sizes round otherwise, also in fp32
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``leave_after``: the caller hangs up after so many events with content; None: never."""

    path: str
    body: Json
    leave_after: int | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Choice:
    """What came of one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)  # where logprobs were asked for
    logprobs: list[float | None] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class Answer:
    """``error``: the server said, in the form that the door promises, that it failed.
    ``broken``: it did what no server may do."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Json | None = None
    num_events: int = 0  # with content
    is_whole: bool = False
    has_left: bool = False
    error: str | None = None
    broken: str | None = None


class Verdict(StrEnum):
    RIGHT = "right"
    ERROR = "error"  # accepted, and ended with a proper error; what came before it is right
    REFUSED = "refused"  # at once, with a proper error
    WRONG = "wrong"  # other ids, texts or counts
    BROKEN = "broken"  # cut without a word, silent, or not in the door's form


# Questions


class Questions:
    """An endless supply, the same for the same seed. Prompts of several share prefixes."""

    def __init__(self, seed: int, *, max_prompt: int = 220, max_output: int = 40) -> None:
        self._draw = random.Random(seed)
        self._max_prompt = max_prompt
        self._max_output = max_output
        self._prefixes = [self._ids(max_prompt // 2) for _ in range(3)]

    def some(self, count: int, *, share_leaving: float = 0.0) -> list[Question]:
        return [self.one(share_leaving=share_leaving) for _ in range(count)]

    def one(self, *, share_leaving: float = 0.0) -> Question:
        draw = self._draw
        body: Json = {
            "max_tokens": draw.choice([1, 2, draw.randrange(3, self._max_output)]),
            "temperature": draw.choice([0.0, 0.8, 1.0]),
            "seed": draw.randrange(1000),
            "ignore_eos": True,
        }
        if draw.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if draw.random() < 0.3:
            body["n"] = draw.randrange(2, 4)
        if draw.random() < 0.3:
            body["stop"] = draw.sample([" e", "q", "7", "B", "x", "\n"], 3)
        kind = draw.random()
        if kind < 0.15:
            path, more = "/v1/chat/completions", self._constrained()
        elif kind < 0.3:
            path, more = "/v1/chat/completions", self._chat()
        else:
            path, more = "/v1/completions", self._completion()
        leave_after = None
        if draw.random() < share_leaving:
            leave_after = draw.randrange(0, self._max_output)
        return Question(path=path, body=body | more, leave_after=leave_after)

    def _completion(self) -> Json:
        draw = self._draw
        more: Json = {"prompt": self._prompt()}
        kind = draw.random()
        if kind < 0.1:
            more["prompt"] = [self._prompt(), self._prompt()]
        if kind < 0.7:
            more["logprobs"] = draw.randrange(3)
        if kind > 0.95:
            more |= {"echo": True, "logprobs": 0}
        return more

    def _prompt(self) -> list[int]:
        draw = self._draw
        kind = draw.random()
        if kind < 0.1:
            return self._ids(draw.randrange(1, 4))  # nothing, or next to nothing, to hand over
        if kind < 0.25:
            return self._ids(32 * draw.randrange(1, self._max_prompt // 32 + 1))  # whole blocks
        if kind < 0.65:
            prefix = draw.choice(self._prefixes)
            return prefix[: draw.randrange(1, len(prefix))] + self._ids(draw.randrange(1, 60))
        return self._ids(draw.randrange(4, self._max_prompt))

    def _chat(self) -> Json:
        draw = self._draw
        words = "".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(4, 60)))
        system = {"role": "system", "content": "Answer in one word, and be kind about it."}
        more: Json = {"messages": [system, {"role": "user", "content": words}]}
        if draw.random() < 0.5:
            more |= {"logprobs": True, "top_logprobs": draw.randrange(3)}
        return more

    def _constrained(self) -> Json:
        wanted = {"name": "animal", "strict": True, "schema": SCHEMA}
        return self._chat() | {
            "max_tokens": 60,
            "ignore_eos": False,
            "stop": None,
            "response_format": {"type": "json_schema", "json_schema": wanted},
        }

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(256) for _ in range(count)]


# Asking


def ask(served: Served, question: Question, saw_token: Callable[[], None] = lambda: None) -> Answer:
    """Ask, and follow the answer to its end. ``saw_token`` is called as content comes."""
    answer = Answer()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=ANSWER_LIMIT_S)
    try:
        body = json.dumps(question.body).encode()
        connection.request("POST", question.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200 or not question.is_streamed:
            _take_whole(answer, json.loads(response.read()))
        else:
            _follow(answer, question, _events(response), saw_token)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def ask_all(served: Served, questions: Sequence[Question], *, at_once: int = 8) -> list[Answer]:
    """Answers in the questions' order, ``at_once`` of them asked at any time."""
    answers: dict[int, Answer] = {}
    left = iter(range(len(questions)))
    lock = threading.Lock()

    def caller() -> None:
        while True:
            with lock:
                index = next(left, None)
            if index is None:
                return
            answers[index] = ask(served, questions[index])

    threads = [threading.Thread(target=caller) for _ in range(min(at_once, len(questions)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(questions))]


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each event. Comments keep a connection open; a server that sends nothing
    else for too long counts as silent."""
    silent_since_s = time.monotonic()
    while line := response.readline():
        if line.startswith(b"data: "):
            silent_since_s = time.monotonic()
            yield line[6:].decode().strip()
        elif time.monotonic() - silent_since_s > ANSWER_LIMIT_S:
            raise TimeoutError(f"nothing but comments for {ANSWER_LIMIT_S:.0f} s")


def _follow(
    answer: Answer, question: Question, events: Iterator[str], saw_token: Callable[[], None]
) -> None:
    if question.leave_after == 0:
        answer.has_left = True
        return
    for data in events:
        if data == "[DONE]":
            answer.is_whole = answer.error is None
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = _error_text(event)
            continue
        if answer.error is not None:
            answer.broken = "content after an error"
            return
        if event.get("usage") is not None:
            answer.usage = event["usage"]
        has_content = False
        for choice in event["choices"]:
            has_content |= _take_choice(answer, choice, choice.get("delta", choice))
        if has_content:
            answer.num_events += 1
            saw_token()
        if answer.num_events == question.leave_after:
            answer.has_left = True
            return
    if answer.error is None:
        answer.broken = "the stream was cut without a word"


def _take_whole(answer: Answer, body: Json) -> None:
    if answer.status != 200:
        answer.error = _error_text(body)
        return
    choices = body["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        _take_choice(answer, choice, choice.get("message", choice))
    usage = body["usage"]
    assert isinstance(usage, dict)
    answer.usage = usage
    answer.is_whole = True


def _take_choice(answer: Answer, choice: Json, said: Json) -> bool:
    """True if there was content in it."""
    index = choice["index"]
    assert isinstance(index, int)
    own = answer.choices.setdefault(index, Choice())
    text = said.get("content") or said.get("text") or ""
    assert isinstance(text, str)
    own.text += text
    finish = choice.get("finish_reason")
    if finish is not None:
        own.finish = str(finish)
    found = choice.get("logprobs")
    if isinstance(found, dict):
        if "content" in found:
            own.tokens += [entry["token"] for entry in found["content"]]
            own.logprobs += [entry["logprob"] for entry in found["content"]]
        else:
            own.tokens += found["tokens"]
            own.logprobs += found["token_logprobs"]
    return bool(text)


def _error_text(body: Json) -> str:
    error = body["error"]
    assert isinstance(error, dict)
    assert error["message"]
    assert error["type"]
    return f"{error['code']}: {error['message']}"


# Comparing


def judge(answer: Answer, expected: Answer) -> Verdict:
    """``answer`` against the one that nothing disturbed."""
    if answer.broken is not None:
        return Verdict.BROKEN
    if answer.error is not None and answer.status in (429, 503) and not answer.choices:
        return Verdict.REFUSED
    if not _is_beginning(answer, expected):
        return Verdict.WRONG
    if answer.error is not None:
        return Verdict.ERROR
    if answer.has_left:
        return Verdict.RIGHT
    if not answer.is_whole or not _same_ends(answer, expected):
        return Verdict.WRONG
    return Verdict.RIGHT


def _is_beginning(answer: Answer, expected: Answer) -> bool:
    """Whether nothing came that should not have, twice, or in another order."""
    for index, choice in answer.choices.items():
        whole = expected.choices.get(index)
        if whole is None or not whole.text.startswith(choice.text):
            return False
        num_tokens = len(choice.tokens)
        if whole.tokens[:num_tokens] != choice.tokens:
            return False
        if not all(map(_is_near, choice.logprobs, whole.logprobs)):
            return False
    return True


def _is_near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, abs_tol=LOGPROB_TOLERANCE)


def _same_ends(answer: Answer, expected: Answer) -> bool:
    if answer.choices.keys() != expected.choices.keys():
        return False
    for index, choice in answer.choices.items():
        whole = expected.choices[index]
        if (choice.text, choice.tokens, choice.finish) != (whole.text, whole.tokens, whole.finish):
            return False
    return _counts(answer) == _counts(expected)


def _counts(answer: Answer) -> tuple[object, object]:
    """What is charged for; hits depend on what was asked before."""
    usage = answer.usage
    assert usage is not None
    hit, miss = usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]
    assert isinstance(hit, int)
    assert isinstance(miss, int)
    assert hit + miss == usage["prompt_tokens"], "hits and misses add up to the prompt"
    return usage["prompt_tokens"], usage["completion_tokens"]


def describe(question: Question, answer: Answer, expected: Answer) -> str:
    """For a failure's message: toy prompts are nobody's."""
    lines = [f"{question.path} {json.dumps(question.body)[:600]} leaves {question.leave_after}"]
    if answer.broken or answer.error:
        lines.append(f"broken: {answer.broken}; error: {answer.error}; status {answer.status}")
    for index in sorted(answer.choices.keys() | expected.choices.keys()):
        lines.append(f"  {index} got  {answer.choices.get(index)}")
        lines.append(f"  {index} want {expected.choices.get(index)}")
    lines.append(f"  usage got {answer.usage}, want {expected.usage}")
    return "\n".join(lines)
