r"""Spellings of one answer, and answers that only look equal, as the graders of the papers judge them.

MATH's is_equiv (Hendrycks et al. 2021), Minerva's normalize_final_answer (Lewkowycz et al. 2022), the grader
of PRM800K (Lightman et al. 2023), math_equal of DeepSeek-Math and Qwen2.5-Math, and Math-Verify: a row has
the verdict on which those that read such a spelling agree. A decimal is no fraction that it only rounds.
"""

import pytest

from tmoe.post.rewards import RewardSample
from tmoe.post.rewards.boxed import boxed, same
from tmoe.post.rewards.expression import value_of
from tmoe.post.rewards.multiple_choice import letter_of
from tmoe.post.rewards.number import number

EQUAL = r"""
1\frac12                     | \frac32                    | mixed fractions
1\frac{1}{2}                 | 1.5
3 1/2                        | \frac{7}{2}
-2\tfrac34                   | -\frac{11}{4}
3½                           | 3.5
\frac12                      | 0.5                        | a half
\dfrac12                     | \frac{1}{2}
\tfrac{1}{2}                 | 1/2
.5                           | 0.50
\frac{-1}{2}                 | -\frac{1}{2}
-1/2                         | \frac{1}{-2}
\frac1{72}                   | \frac{1}{72}               | unit fractions
\frac{1}{72}                 | 1/72
\frac{2}{4}                  | \frac12                    | not in lowest terms
1,000,000                    | 1000000                    | thousands
1{,}000                      | 1000
10\,000                      | 10,000
1,\!000                      | 1000
12,345.60                    | 12345.6
\$5                          | 5                          | money
\$1,234.50                   | 1234.5
$18$                         | 18
18.                          | 18
50\%                         | 50                         | per cent
12.5\%                       | 12.5%
90^\circ                     | 90                         | degrees
90^{\circ}                   | 90\text{ degrees}
45°                          | 45
\text{5}                     | 5                          | words of TeX
\mathrm{5}                   | 5
5\text{ cm}                  | 5                          | units
5 \text{ cm}^2               | 5
24\mathrm{~m}^{2}            | 24
7\ \text{inches}             | 7
12 square units              | 12
\frac{3}{4}\text{ miles}     | 0.75
5 dollars                    | \$5
\sqrt3                       | \sqrt{3}                   | roots
\sqrt{12}                    | 2\sqrt{3}
\frac{6}{\sqrt{3}}           | 2\sqrt3
\frac{\sqrt2}{2}             | \frac{1}{\sqrt{2}}
\sqrt{16}                    | 4
\frac xy                     | \frac{x}{y}
11\text{ \%}                 | 11
\sqrt[3]{27}                 | 3
\frac{-\pi}{4}               | -\frac{\pi}{4}             | signs of what is not rational
\frac{-1-\sqrt5}{2}          | -\frac{1+\sqrt5}{2}
16\pi\text{ cm}^2            | 16\pi
5 percent                    | 5\%
2\cdot\sqrt{5}               | 2\sqrt{5}
8^{1/3}                      | 2                          | powers
2^{10}                       | 1024
2 \times 10^{-3}             | 0.002
1.5 \cdot 10^4               | 15000
\frac{\pi}{2}                | \frac12\pi                 | pi
2π                           | 2\pi
\frac{1+\sqrt{5}}{2}         | \frac12+\frac{\sqrt{5}}{2} | sums
3 - (-2)                     | 5
\frac{\frac12}{3}            | \frac{1}{6}                | nested braces
\frac{x}{2}                  | \dfrac{x}{2}               | letters
\frac{x}{2}                  | x/2
x^{2}+1                      | x^2 + 1
a_{1}                        | a_1
2 \cdot x                    | 2x
x = 5                        | 5                          | what a letter is
y=2x+3                       | 2x+3
x \in [1, 2]                 | [1,2]
\left(1, 2\right)            | (1,2)                      | pairs and intervals
(\frac12, 3)                 | (0.5,3)
(-\infty, 2]                 | \left(-\infty,2\right]
[0, +\infty)                 | [0,\infty)
(0,\sqrt{8})                 | (0, 2\sqrt2)
(-\infty,1) \cup (2,\infty)  | (2,\infty)\cup(-\infty,1)
\{1, 2, 3\}                  | \{3,2,1\}                  | sets
\lbrace \frac12, 2\rbrace    | \{0.5,2\}
1, 2                         | 1,2                        | lists
1 \text{ and } 2             | 1,2
-1 \text{ or } 3             | -1, 3
\text{Evelyn}                | Evelyn                     | words
\text{east}                  | East
\textbf{(B)}                 | B                          | a letter
(C)                          | \text{C}
5cm                          | 5                          | a unit right behind the number
10 m/s                       | 10\text{ m/s}              | rates
£1,200                       | \pounds 1200               | money
1 000 000                    | 1,000,000                  | thousands
0.\overline{3}               | \frac13                    | decimals whose digits repeat
0.1\overline{6}              | 1/6
-1.\overline{09}             | -\frac{12}{11}
\mathbb R                    | \mathbb{R}                 | arguments of one letter
\lvert x\rvert               | |x|
\{x \mid x > 2\}             | \{x|x>2\}
\emptyset                    | \{ \}
\( \frac{3}{4} \)            | 3/4                        | signs around all of it
\[ x^2+1 \]                  | x^2 + 1
\(5\) cm.                    | 5
{(1,2)}                      | (1, 2)
\mathbf{\frac{3}{4}}         | 0.75
\text{$\sqrt{2}$ cm}         | \sqrt2
\boldsymbol{-7}              | -7
\approx 3.14                 | 3.14
x = \pm 2                    | -2, 2                      | both signs
\{3 - 2\sqrt2, 3+\sqrt{8}\}  | 3 ± 2\sqrt{2}
\frac{1\pm\sqrt{5}}{2}       | \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
\pm y                        | y, -y
x \leq 3                     | x\le3                      | signs
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} | a matrix
"""
OTHER = r"""
\frac13                      | 0.333                      | a decimal that rounds
0.3333                       | \frac{1}{3}
0.\overline{3}               | 0.3
3.14                         | \pi
1.41421356                   | \sqrt{2}
\frac{1}{3}                  | \frac{1}{4}
1\frac12                     | \frac12
2\frac12                     | 1
-5                           | 5
1,000                        | 1
1,000                        | 1.000
1, 000                       | 2000
50\%                         | 5
0.5\%                        | 50\%
\sqrt{3}                     | 3
2\sqrt{3}                    | \sqrt{6}
\sqrt[3]{8}                  | \sqrt{8}
2^{3}                        | 6
10^{2}                       | 10^{3}
(1,2)                        | (2,1)
(1,2)                        | [1,2]
(1,2]                        | (1,2)
(1,2)                        | (1,2,3)
(1,2)                        | 2
(-\infty,1)                  | (-\infty,1)\cup(2,\infty)
\{1,2\}                      | \{1,2,3\}
\{1,1,2\}                    | \{1,2,2\}
1,2                          | 1
1,2                          | 12
1 2                          | 12
3 4                          | 34
10 200                       | 10
0.\overline{3}               | 0.33
0.\overline{3}               | 3
0.\overline{12}              | 0.1\overline{2}
\mathbb{R}                   | \mathbb{Q}
\{0\}                        | \emptyset
{x}{y}                       | {x}
\approx 3.14                 | \pi
x+1                          | x-1
x^2                          | x^3
x^{12}                       | x^{1}2
\frac{x}{2}                  | \frac{2}{x}
\frac{a+b}{2}                | a+\frac{b}{2}
5x                           | 5
x                            | X
a_1                          | a_2
1011_2                       | 1011
\text{east}                  | west
(A)                          | (B)
10\text{ a.m.}               | 10\text{ p.m.}
x \le 3                      | x < 3
x \ge 3                      | x \le 3
5 \pm \sqrt{2}               | 5+\sqrt{2}
\pm 1                        | 1, 1
\pm 1                        | 1, -1, 0
\pm 1                        | -1
\pm 1                        | \mp 1
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
                             | 5
\frac{1}{0}                  | \frac{2}{0}
"""


def rows(table):
    return [[part.strip() for part in line.split(" | ")[:2]] for line in table.strip("\n").splitlines()]


def of(told, answer):
    return RewardSample("question", told, {"answer": answer}, "stop", 9, 3, 7, 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_spellings_of_one_answer(swapped):
    wrong = [
        pair for pair in rows(EQUAL) if not boxed(of(f"so \\boxed{{{pair[swapped]}}}", pair[not swapped]))
    ]
    assert len(rows(EQUAL)) == 107 and wrong == []


@pytest.mark.parametrize("swapped", [False, True])
def test_answers_that_are_not_one(swapped):
    wrong = [pair for pair in rows(OTHER) if same(pair[swapped], pair[not swapped])]
    assert len(rows(OTHER)) == 61 and wrong == []


NUMBERS = r"""
so \boxed{1\frac12}                            | 3/2       | 1
it is \boxed{\frac1{72}}                       | 1/72      | 1
\boxed{25 \text{ cm}^2}                        | 25        | 1
\boxed{25 \text{ cm}^2}                        | 2         | 0
an area of 25 cm^2                             | 25        | 1
an area of 25 m^{2}.                           | 25        | 1
\boxed{\sqrt{16}}                              | 4         | 1
\boxed{\sqrt{16}}                              | 16        | 0
\boxed{2\sqrt{3}}                              | \sqrt{12} | 1
\boxed{\sqrt{2}}                               | 2         | 0
\boxed{\sqrt{2}}                               | 1.41421356 | 0
\boxed{\frac{\pi}{2}}                          | \frac12\pi | 1
\boxed{3\pi}                                   | 3         | 0
3½ cups                                        | 3.5       | 1
\boxed{\text{The answer is } 1{,}234}          | 1234      | 1
\boxed{\mathrm{42}}                            | 42        | 1
\$1,234.50                                     | 1234.5    | 1
#### 1,080                                     | 1080      | 1
#### 18 dollars                                | 18        | 1
\boxed{90^\circ}                               | 90        | 1
\boxed{50\%}                                   | 0.5       | 1
x = \frac{3}{4}                                | 0.75      | 1
2 \times 10^{3}                                | 2000      | 1
0.333                                          | 1/3       | 0
no number                                      | 3         | 0
it is 2 1/3                                    | 7/3       | 1
\boxed{-2 1/3}                                 | -7/3      | 1
12 of 12 1/3                                   | 1/3       | 0
#### 18\n\nQuestion: Tom has 5 apples.          | 18        | 1
#### $1,234 (6 * 7 of them)                    | 1234      | 1
#### 6 * 7 = 42                                | 42        | 1
#### 1. Addition\nSo it is 18.                  | 18        | 1
#### Step 3\nSo it is 18.                       | 18        | 1
#### 2\sqrt{4}                                 | 4         | 1
\boxed{0.\overline{3}}                         | 1/3       | 1
\boxed{0.\overline{3}}                         | 3         | 0
x = 2.1\overline{6}                            | 13/6      | 1
"""


def test_numbers():
    found = [[part.strip() for part in line.split("|")] for line in NUMBERS.strip().splitlines()]
    wrong = [line for line in found if number(of(line[0].replace(r"\n", "\n"), line[1])) != float(line[2])]
    assert len(found) == 37 and wrong == []


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *[
            (r"\boxed{B}", "B"),
            (r"\boxed{\text{B}}", "B"),
            (r"\boxed{\mathrm{(B)}}", "B"),
            (r"\boxed{(b)}", "B"),
        ],
        *[(r"\boxed{\textbf{(D) } 12}", "D"), (r"\boxed{\text{D. } x}", "D"), (r"$\boxed{\mathbf{E}}$", "E")],
        *[("The final answer is (A).", "A"), ("**Answer:** C", "C"), ("The answer is $\\text{C}$.", "C")],
        *[("So the correct option is B", "B"), ("Answer: D) 7", "D"), (r"\boxed{12}", None)],
        *[("<think>(A)?</think><answer>B</answer>", "B"), ("(A) or so\n#### C", "C"), ("Answer: “D”", "D")],
        *[("#### C\n\nQuestion: (A) or (B)?", "C"), ("#### Step 3\nThe answer is B.", "B")],
        *[("The answer is (J).", "J"), ("The answer is I.", "I"), ("The answer is I think (B)", "B")],
        *[("Option C", "C"), (r"\boxed{\text{Option C}}", "C"), ("<answer>Option (C)</answer>", "C")],
        *[("Answer:C", "C"), ("The answer must be C.", "C"), (r"\boxed{(A) or (B)}", None), ("f(A)", None)],
        *[("A good idea", None), (r"\boxed{\text{Be}}", None), ("Because of this, E is wrong", None)],
    ],
)
def test_letters(text, letter):
    assert letter_of(text) == letter


@pytest.mark.parametrize(
    ("box", "truth", "reward"),
    [
        *[("(C) 12", "C", 1), (r"\textbf{(C)}\ 12", "(C)", 1), ("C. Paris", r"\text{C}", 1)],
        *[("Answer: C", "C", 1), (r"\text{Option C}", "C", 1), ("C)", "C", 1)],
        *[("c", "C", 0), ("D", "C", 0), ("(A) or (C)", "C", 0), ("P(C)", "C", 0), ("(C) 12", "x", 0)],
        *[("C(n, 2)", "C", 0), ("(D) C", "C", 0)],
    ],
)
def test_text_after_the_letter_of_a_choice(box, truth, reward):
    """As in the grader of Qwen2.5-Math, where the right answer is a letter; another letter stays wrong."""
    assert boxed(of(f"\\boxed{{{box}}}", truth)) == reward


@pytest.mark.parametrize(
    "text",
    [
        *["2^{2^{2^{2^{9}}}}", "9^{400}^{400}", "(" * 300 + "1" + ")" * 300, "\\sqrt[400]{9^{400}}"],
        *[
            "\\frac{1}{" * 90 + "1" + "}" * 90,
            "9" * 400,
            "((((9^{99})^{99})^{99})^{99})",
            "\\sqrt" * 70 + "2",
        ],
        *[
            "-" * 399 + "1",
            "1/" * 199 + "1",
            "1" + "+\\frac{1}{97}" * 27,
            "\\sqrt{-1}",
            "0^{-1}",
            "\\frac{1}{0}",
        ],
    ],
    ids=lambda text: text[:20],
)
def test_large_expressions_end(text):
    """In no time and without an error: a value, or none."""
    value_of(text)
    assert not same(text, "7") and same(f"{text}x", f"{text}x")
