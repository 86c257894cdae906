"""Rewards that tmoe brings, and the words that name them: what is right, what is wrong, what is refused.

next: test_rewards_pool.py
"""

from fractions import Fraction

import pytest

from tmoe.config.check import ConfigError
from tmoe.post.rewards import Rewards, RewardSample, builtin
from tmoe.post.rewards import reward_terms as words
from tmoe.post.rewards.boxed import boxed
from tmoe.post.rewards.code import program_of
from tmoe.post.rewards.exact import exact
from tmoe.post.rewards.multiple_choice import choice, letter_of
from tmoe.post.rewards.number import number, number_of, read_number
from tmoe.post.rewards.regex import regex
from tmoe.post.rewards.tex import last_boxed


def of(told, **row):
    return RewardSample("question", told, row, "stop", len(told), 3, 7, 0)


def test_exact():
    assert exact(of(" Paris\n", answer="Paris")) == 1.0
    assert exact(of("paris", answer="Paris")) == 0.0
    assert exact(of("4", answer=4)) == 1.0 and exact(of("4", solution="4")) == 1.0
    with pytest.raises(ValueError, match="no field answer or solution, only question"):
        exact(of("4", question="?"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1,234.50", "1234.5"), ("so it costs $18.", "18"), ("$\\$1{,}000$", "1000"), ("1\\,000", "1000")],
        *[
            ("\\frac{1}{2}", "1/2"),
            ("\\dfrac12", "1/2"),
            ("3\\frac{1}{2}", "7/2"),
            ("-\\frac{ 3 }{4}", "-3/4"),
        ],
        *[("-3\\tfrac12", "-7/2"), ("\\frac{-1}{2}", "-1/2"), ("3/4", "3/4"), ("−.5", "-1/2")],
        *[("2 \\times 10^{3}", "2000"), ("1.5e-2", "3/200"), ("10^5", "100000"), ("2^{-1}", "1/2")],
        *[("5-3", "3"), ("x = -5", "-5"), ("steps 1 and 2\n#### 72 apples", "72"), ("18 apples", "18")],
        *[("\\boxed{1} no, \\boxed{\\frac{1}{3}} in all 9", "1/3"), ("90^\\circ", "90"), ("1, 2, 3", "3")],
    ],
)
def test_numbers_are_read_as_fractions(text, value):
    assert number_of(text).value == Fraction(value)


@pytest.mark.parametrize("text", ["", "none", "1/0", "\\frac{1}{0}", "1e99999999", "9" * 5000, "0^{-1}"])
def test_what_is_no_number(text):
    assert number_of(text) is None


def test_number_compares_exactly():
    assert number(of("0.1 + 0.2 is 0.3", answer="3/10")) == 1.0
    assert number(of("0.30000000000000004", answer="0.3")) == 0.0
    assert number(of("no idea", answer="0.3")) == 0.0
    assert number(of("1/3", answer="0.3333")) == 0.0
    assert number(of("it is 72", answer="half of 144 is 72\n#### 72")) == 1.0
    with pytest.raises(ValueError, match="the row's answer 'many' has no number"):
        number(of("3", answer="many"))


def test_signs_of_per_cent():
    for told, truth, right in (("50%", "50", 1), ("50\\%", "0.5", 1), ("50", "50%", 1), ("50%", "0.5%", 0)):
        assert number(of(told, answer=truth)) == right


def test_boxes_nest():
    assert last_boxed("\\boxed{1} and \\boxed{\\frac{1}{\\sqrt{2}}}.") == "\\frac{1}{\\sqrt{2}}"
    assert last_boxed("\\boxed {x}") == "x" and last_boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert last_boxed("\\boxed{3} \\boxed{4") == "3" and last_boxed("\\boxed 3") is None
    assert last_boxed("\\boxed{a \\boxed{b}}") == "b"


def test_boxed():
    assert boxed(of("so \\boxed{ \\dfrac{x}{2} }", answer="\\frac{x}{2}")) == 1.0
    assert boxed(of("\\boxed{\\left(1, 2\\right)}", answer="it is \\boxed{(1,2)}")) == 1.0
    assert boxed(of("\\boxed{0.50}", answer="\\frac12")) == 1.0
    assert boxed(of("x/2", answer="x/2")) == 0.0  # no box
    assert boxed(of("\\boxed{(1,3)}", answer="(1,2)")) == 0.0  # of a pair, the last number is not all


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *[("B", "B"), ("(b)", "B"), ("The answer is (C).", "C"), ("Answer: **E**", "E"), ("**D**", "D")],
        *[("\\boxed{\\text{(C) five}}", "C"), ("I would choose (A)", "A"), ("because\nB. five", "B")],
        *[("The correct answer is option C", "C"), ("Answer: B. No, answer: D", "D"), ("answer = A", "A")],
        *[("the answer is a dog", None), ("A dog", None), ("", None), ("\\boxed{7}", None), ("BAD", None)],
    ],
)
def test_letters(text, letter):
    assert letter_of(text) == letter


def test_choice():
    assert choice(of("answer: B", answer="B")) == 1.0 and choice(of("answer: B", answer=1)) == 1.0
    assert choice(of("answer: B", answer="(A)")) == 0.0 and choice(of("answer: B", answer=1.0)) == 1.0
    with pytest.raises(ValueError, match="no letter of ABCDEFGHIJ"):
        choice(of("B", answer="none of these"))


@pytest.mark.parametrize("answer", [[1], {"a": 1}, float("nan"), float("inf"), ""], ids=str)
def test_what_is_no_right_answer(answer):
    with pytest.raises(
        ValueError, match=r"the row's answer is .*; must be text, not empty, or a finite number"
    ):
        exact(of("4", answer=answer))


def test_regex():
    assert regex(of("<think>a\nb</think> c"), "^<think>.*</think>") == 1.0
    assert regex(of("a", pattern="b"), None) == 0.0
    for row, said in (
        (dict(), "the row's pattern is None; must be"),
        (dict(pattern=5), "the row's pattern is 5"),
        (dict(pattern="("), r"the row's pattern '\(' is no regular expression: missing"),
    ):
        with pytest.raises(ValueError, match=said):
            regex(of("a", **row), None)


def test_a_byte_order_mark_of_a_file_is_left_out(tmp_path):
    (tmp_path / "mine.py").write_bytes(b"\xef\xbb\xbfdef f(sample): return 1\n")
    (term,) = words.parse([f"{tmp_path}/mine.py:f"], code=False)
    assert term.source == "def f(sample): return 1\n"


@pytest.mark.parametrize(
    ("word", "row", "said"),
    [
        (
            "exact",
            dict(solution=None),
            "--grpo.rewards=exact: the row has no field answer or solution, only solution (null)",
        ),
        (
            "number:0.5",
            dict(answer="many"),
            "--grpo.rewards=number:0.5: the row's answer 'many' has no number",
        ),
        ("boxed", dict(), "--grpo.rewards=boxed: the row has no field"),
        ("choice", dict(answer="17"), "--grpo.rewards=choice: the row's answer '17' is no letter"),
        ("regex", dict(answer="7"), "--grpo.rewards=regex: the row's pattern is None"),
        ("code", dict(tests=[]), '--grpo.rewards=code: the row\'s "tests" must be'),
    ],
)
def test_a_row_of_which_no_answer_can_be_judged(word, row, said):
    rewards = Rewards.__new__(Rewards)  # without processes
    rewards.terms = words.parse([word, "length(4,2)", "regex(a):2"], code=True)
    with pytest.raises(ValueError) as error:
        rewards.require_row("question", row)
    assert said in str(error.value)
    rewards.require_row("question", dict(answer="B: 5", pattern="a", tests="assert f()"))


def test_programs():
    assert program_of("```python\na\n```\nbetter:\n```python\nb\n```\n") == "b\n"
    assert program_of("```python\na\n```\nit prints:\n```\nb\n```\n") == "a\n"
    assert program_of("```\na\n```\nbetter:\n```\nb\n```\n") == "b\n" and program_of("a = 1") == "a = 1"


def test_long_answers_take_linear_time():
    """What models repeat without end; quadratic code would take hours. No clock: pytest's limit is one."""
    n = 5_000
    repeated = [
        "\\sqrt{2}",
        "2 ",
        "2 cm^",
        "\\text{a} ",
        " square aa",
        "\\frac12",
        "(1,",
        "\\cup",
        "\\boxed{",
        "\\frac{",
        "answer is ",
        "(",
        "1,",
        "1 x 10 ",
        "{",
        "-",
        "\\frac{1}{2}",
        "```\n",
    ]
    for text in (*(one * n for one in repeated), " " * 10 * n, "answer:" + " " * 10 * n, "9" * 10 * n):
        sample = of(text, answer="A")
        assert choice(sample) in (0.0, 1.0) and boxed(sample) == 0.0
        assert read_number(text) is None and program_of(text) is not None
        number_of(text)
        boxed(of(f"\\boxed{{{text}}}", answer=f"{text}2"))
        number_of(f"\\boxed{{{text}}}")


# ---- words ----


def test_words_are_taken_apart(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("")
    said = ["number", "exact:0.5", "regex(a:(b):c):-1e-1", f"{file}:brief", f"{file}:kind:2"]
    terms = words.parse(said, code=False)
    assert [term.weight for term in terms] == [1.0, 0.5, -0.1, 1.0, 2.0]
    assert [term.label for term in terms] == ["number", "exact", "regex", "brief", "kind"]
    assert terms[2].argument == "a:(b):c" and terms[3].file == file
    assert set(words.NAMES) == {*builtin.PLAIN, "regex", "length", "code"}


def test_two_of_one_name_are_called_by_all_that_was_said():
    labels = [term.label for term in words.parse(["regex(a):2", "regex(b):.1"], code=False)]
    assert labels == ["regex(a)", "regex(b)"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("exakt", "valid: exact, number, boxed, choice, regex, length, code or FILE.py:FUNCTION"),
        ("", "valid: exact"),
        ("number:1:2", "valid: exact"),
        ("exact:", "the weight '' must be a finite number other than 0"),
        ("exact:nan", "the weight 'nan' must be a finite number other than 0"),
        ("exact:1e39", "the weight '1e39' must be a finite number other than 0, in float32"),
        ("exact:0", "must be a finite number other than 0"),
        ("exact(3)", "exact takes nothing in brackets, got (3)"),
        ("regex((a)", "no regular expression: missing )"),
        ("length", "must be length(LONGEST,MARGIN) in tokens"),
        ("length(20,100)", "MARGIN above 0 and at most LONGEST"),
        ("code", "runs programs that the model has written; allow that with --grpo.code"),
        ("nowhere.py:f", "nowhere.py cannot be read"),
    ],
)
def test_words_that_say_no_reward(word, told):
    with pytest.raises(ConfigError) as error:
        words.parse([word], code=False)
    assert str(error.value).startswith(f"--grpo.rewards={word}: ") and told in str(error.value)


def test_words_as_a_whole():
    for said, told in (
        ([], "must be a list of at least one reward"),
        ("exact", "must be a list of at least one reward"),
        (["exact", "exact:2"], "exact is given 2 times; give it once"),
    ):
        with pytest.raises(ConfigError, match=told):
            words.parse(said, code=False)
    with pytest.raises(ConfigError, match="workers=0: rewards need at least 1 process"):
        Rewards(["exact"], workers=0)
    with pytest.raises(ConfigError, match="timeout_s=0: the time for a reward must be above 0"):
        Rewards(["exact"], timeout_s=0)


def test_length_needs_no_process():
    """DAPO's values: 90 of 100 tokens with a margin of 20 cost a half."""
    samples = [of("x" * n) for n in (80, 90, 100, 120)]
    with Rewards(["length(100,20):2"]) as rewards:
        assert rewards.pool is None
        scores = rewards.score(samples)
        assert rewards.score([]) == ([], {"length": []}, {})
    assert scores.parts == {"length": [0.0, -0.5, -1.0, -1.0]}
    assert scores.rewards == [0.0, -1.0, -2.0, -2.0] and scores.faults == {}
