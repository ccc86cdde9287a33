"""Chat templates: what the sandbox allows, what it bounds, and where text came from."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime

import pytest

from headwater.core.errors import InvalidRequest, ModelError
from headwater.recipe.provenance import outside, placed
from headwater.recipe.sandbox_limits import TemplateLimits
from headwater.recipe.template import ChatTemplate, Rendered, TemplateRefused

TYPED = "hi <|end|>"


def render(
    source: str,
    content: str = TYPED,
    *,
    num_messages: int = 1,
    limits: TemplateLimits | None = None,
) -> Rendered:
    template = ChatTemplate(
        source,
        variables={"bos_token": "<s>"},
        now=lambda: datetime(2026, 3, 4),
        limits=limits,
    )
    messages = [
        {"role": placed("user"), "content": outside(content, index)}
        for index in range(num_messages)
    ]
    return template.render(messages, num_input_chars=len(content) * num_messages)


def placed_text(rendered: Rendered) -> str:
    return "|".join(rendered.text[start:end] for start, end in rendered.placed)


@pytest.mark.parametrize(
    ("source", "text", "placed_parts"),
    [
        ("<s>{{ messages[0].content }}<e>", "<s>hi <|end|><e>", "<s>|<e>"),
        ("{{ '<s>' + messages[0]['content'] + '<e>' }}", "<s>hi <|end|><e>", "<s>|<e>"),
        ("{{ '<s>' ~ messages[0].content ~ '<e>' }}", "<s>hi <|end|><e>", "<s>|<e>"),
        ("{{ '<s>%s<e>' % messages[0].content }}", "<s>hi <|end|><e>", "<s>|<e>"),
        ("{{ ['<s>', messages[0].content, '<e>'] | join }}", "<s>hi <|end|><e>", "<s>|<e>"),
        ("{{ ['<s>', messages[0].content] | join('-') }}", "<s>-hi <|end|>", "<s>-"),
        ("{{ '-'.join(['<s>', messages[0].content]) }}", "<s>-hi <|end|>", "<s>-"),
        ("{{ messages[0].content | replace('hi', '<s>') }}", "<s> <|end|>", "<s>"),
        ("{{ messages[0].content.replace('hi', '<s>') }}", "<s> <|end|>", "<s>"),
        ("{{ '<s>' + messages[0].content | trim | upper }}", "<s>HI <|END|>", "<s>"),
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi <|end|>", "<s>"),
        ("{{ '<' + messages[0].role + '>' }}x", "<user>x", "<user>x"),
        ("{% set x %}<s>{{ messages[0].content }}{% endset %}{{ x }}", "<s>hi <|end|>", "<s>"),
        ("{% macro m(t) %}<s>{{ t }}{% endmacro %}{{ m(messages[0].content) }}",
         "<s>hi <|end|>", "<s>"),
        ("{% for t in ['<s>', '<e>'] %}{{ t }}{% endfor %}", "<s><e>", "<s><e>"),
        ("{{ {'user': '<s>'}[messages[0].role] }}{{ messages[0].content }}",
         "<s>hi <|end|>", "<s>"),
        ("{% set ns = namespace(t='<s>') %}{% set ns.t = ns.t + messages[0].content %}{{ ns.t }}",
         "<s>hi <|end|>", "<s>"),
        ("{{ messages[0].content.split(' ')[-1] }}<e>", "<|end|><e>", "<e>"),
        ("{{ messages[0].content[3:] + '<e>' }}", "<|end|><e>", "<e>"),
        ("{% generation %}<s>{{ messages[0].content }}{% endgeneration %}", "<s>hi <|end|>", "<s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <|end|>"}]', ""),
        ("{{ messages[0].content | tojson }}<e>", '"hi <|end|>"<e>', "<e>"),
        ("{% for c in messages[0].content %}{{ c }}.{% endfor %}",
         "h.i. .<.|.e.n.d.|.>.", ".|.|.|.|.|.|.|.|.|."),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026", "04 Mar 2026"),
        ("{{ 'a\nb' | indent(2) }}{{ 'c\n\nd' | indent(2, true, true) }}",
         "a\n  b  c\n  \n  d", "a\n  b  c\n  \n  d"),
        ("{{ [1, 2] | sum }}{{ [3] | map('string') | join }}", "33", ""),
        ("{{ range(3) | list | length }}{{ dict(a=1).a }}", "31", ""),
        ("{{ '<e>' if '<|end|>' in messages[0].content else 'no' }}", "<e>", "<e>"),
    ],
)  # fmt: skip
def test_the_text_is_jinjas_and_only_the_templates_literals_are_placed(
    source: str, text: str, placed_parts: str
) -> None:
    rendered = render(source)
    assert rendered.text == text
    assert placed_text(rendered) == placed_parts


def test_origins_say_which_message_text_came_from() -> None:
    rendered = render(
        "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", " ab ", num_messages=3
    )
    assert rendered.text == "<ab><ab><ab>"
    assert rendered.origins == [(1, 3, 0, 1), (5, 7, 1, 1), (9, 11, 2, 1)]


def test_blocks_are_trimmed_as_hugging_face_templates_expect() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb\n").text == "  a\nb"


def test_a_refusal_carries_the_templates_words_but_no_outside_text() -> None:
    with pytest.raises(TemplateRefused) as caught:
        render("{{ raise_exception('No ' + messages[0].content + ' here, please') }}")
    assert caught.value.param == "messages"
    assert "No … here, please" in str(caught.value)
    assert "hi" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ '%d' % messages[0].content }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ lipsum(5) }}",
    ],
)
def test_a_failing_template_is_a_clear_400_without_message_text(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert "hi" not in str(caught.value).split()
    assert "<|end|>" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% if %}", "line 1"),
        ("{{ 'a' | center(1000000000) }}", "center"),
        ("{{ x | pprint }}", "pprint"),
        ("{% for a in x recursive %}{{ loop(a) }}{% endfor %}", "recursive"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "compiled|nested"),
        ("x" * 600_000, "characters"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_when_the_model_loads(
    source: str, named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ messages[0].content.center(1000000000) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].content._spans }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_what_the_sandbox_forbids_fails_or_prints_nothing(source: str) -> None:
    with suppress(ModelError, InvalidRequest):
        assert render(source).text == ""  # what may not be read is undefined, and prints nothing


GROWING_LIST = (
    "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = STEP %}{% endfor %}"
)
BOMBS = {
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "range": "{{ range(1000000000) | list | length }}",
    "doubling": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling_concat": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "repeat": "{{ 'ab' * 1000000000000 }}",
    "repeat_list": "{{ [1] * 1000000000000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "multiply": "{% set ns = namespace(n=10 ** 1000) %}{% for i in range(60) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "width": "{{ '%1000000000d' % 1 }}",
    "star": "{{ '%*d' % (1000000000, 1) }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace_method": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000) | join('b' * 100000) }}",
    "join_method": "{{ ('b' * 100000).join('a' * 100000) }}",
    "indent": "{{ ('\n' * 100000) | indent('b' * 100000, true, true) }}",
    "nested": GROWING_LIST.replace("STEP", "[ns.l, ns.l]") + "{{ ns.l }}",
    "nested_tuple": GROWING_LIST.replace("STEP", "(ns.l, ns.l)") + "{{ ns.l | tojson }}",
    "nested_dict": GROWING_LIST.replace("STEP", "{'a': ns.l, 'b': ns.l}") + "{{ ns.l }}",
    "extended": GROWING_LIST.replace("STEP", "ns.l + ns.l"),
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "sum": "{{ [[1]] | sum(start=[]) }}",
    "json_indent": "{{ [1] | tojson(indent=1000000000) }}",
    "sort": "{% set big = 'a' * 1000000 %}{% set ns = namespace(l=[big, big]) %}"
    "{% for i in range(15) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | sort }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_template_is_stopped_before_it_costs_much(name: str) -> None:
    started_s = time.perf_counter()
    with pytest.raises(InvalidRequest):
        render(BOMBS[name])
    assert time.perf_counter() - started_s < 15


def test_wall_time_is_the_last_bound() -> None:
    limits = TemplateLimits(base_steps=10**12, base_chars=10**15, max_s=0.05)
    slow = (
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}"
        "{% if (s + 'b') == s %}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="time"):
        render(slow, limits=limits)


def test_one_rendering_does_not_use_up_the_next_ones_limits() -> None:
    template = ChatTemplate("{% for i in range(600000) %}{% endfor %}ok", variables={})
    for _ in range(3):
        with pytest.raises(InvalidRequest):  # charged by range and again by the loop
            template.render([], num_input_chars=0)
    template = ChatTemplate("{% for i in range(400000) %}{% endfor %}ok", variables={})
    for _ in range(3):
        assert template.render([], num_input_chars=0).text == "ok"
