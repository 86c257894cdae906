r"""The value of a TeX expression of numbers: \frac, \sqrt, \pi, powers, products and sums, without variables.

Rational values are exact, other values have DIGITS digits. So 2\sqrt3, \sqrt{12} and \frac{6}{\sqrt 3} are
equal, and 0.333 is not equal to \frac13.

next: post/rewards/number.py
"""

from __future__ import annotations

import math
import re
from decimal import Context, Decimal, DecimalException
from fractions import Fraction

DIGITS = 60
CLOSE = Decimal(10) ** -40  # relative difference up to which two numbers of DIGITS digits are equal
MOST_CHARACTERS, MOST_DIGITS, MOST_EXPONENT, MOST_DEPTH = 400, 1000, 400, 40
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
CONTEXT = Context(prec=DIGITS, Emax=10**5, Emin=-(10**5))
TOKEN = re.compile(
    r"\s*(\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.?\d*|\.\d+|\\[a-zA-Z]+|[-+*/^(){}\[\]]|\S)\s*"
)
TIMES = "*", "\\cdot", "\\times"
Value = Fraction | Decimal


class NoValue(Exception):
    """Raised for a text that is not an expression of numbers, or is too large."""


def value_of(text: str) -> Value | None:
    """The value of a whole text; None for a text without one, a division by zero, and a text too long."""
    if len(text) > MOST_CHARACTERS or ("," in text and text[:1] in "(["):  # (1,234) is a pair
        return None
    try:
        parser = _Parser(text)
        value = parser.sum()
        return value if parser.at == len(parser.tokens) else None
    except (NoValue, DecimalException, ArithmeticError, ValueError):
        return None


def same_value(a: Value, b: Value) -> bool:
    """Whether two values are equal: exactly if both are rational, else up to CLOSE."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    x, y = _decimal(a), _decimal(b)
    return abs(CONTEXT.subtract(x, y)) <= CLOSE * max(abs(x), abs(y), Decimal(1))


def _decimal(value: Value) -> Decimal:
    if isinstance(value, Decimal):
        return value
    return CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator))


def _checked(value: Value) -> Value:
    if (
        isinstance(value, Fraction)
        and max(abs(value.numerator), value.denominator).bit_length() > 3 * MOST_DIGITS
    ):
        raise NoValue
    return value


def _times(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _checked(a * b)
    return CONTEXT.multiply(_decimal(a), _decimal(b))


def _over(a: Value, b: Value) -> Value:
    if b == 0:
        raise NoValue
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _checked(a / b)
    return CONTEXT.divide(_decimal(a), _decimal(b))


def _plus(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _checked(a + b)
    return CONTEXT.add(_decimal(a), _decimal(b))


def _minus(value: Value) -> Value:
    """The negative of a value. Python's own minus would round a Decimal to 28 digits."""
    return -value if isinstance(value, Fraction) else CONTEXT.minus(value)


def _root(value: Value, n: int) -> Value:
    """The real n-th root; exact if it is rational."""
    if n < 1 or n > MOST_EXPONENT or (value < 0 and n % 2 == 0):
        raise NoValue
    if value < 0:
        return _minus(_root(_minus(value), n))
    if isinstance(value, Fraction):
        parts = [_whole_root(part, n) for part in (value.numerator, value.denominator)]
        if parts[0] is not None and parts[1] is not None:
            return Fraction(parts[0], parts[1])
    x = _decimal(value)
    return CONTEXT.sqrt(x) if n == 2 else CONTEXT.power(x, CONTEXT.divide(Decimal(1), Decimal(n)))


def _whole_root(value: int, n: int) -> int | None:
    """The whole number whose n-th power is `value`; None if there is none."""
    if n == 2:
        root = math.isqrt(value)
    else:
        root = round(CONTEXT.power(Decimal(value), CONTEXT.divide(Decimal(1), Decimal(n)))) if value else 0
    return root if root**n == value else None


def _power(base: Value, exponent: Value) -> Value:
    if not isinstance(exponent, Fraction) or abs(exponent.numerator) > MOST_EXPONENT:
        raise NoValue
    rooted = base if exponent.denominator == 1 else _root(base, exponent.denominator)
    n = exponent.numerator
    if n < 0 and rooted == 0:
        raise NoValue
    if isinstance(rooted, Fraction):
        bits = max(abs(rooted.numerator), rooted.denominator).bit_length()
        if bits * abs(n) > 3 * MOST_DIGITS:
            raise NoValue
        return rooted**n
    return CONTEXT.power(rooted, Decimal(n))


class _Parser:
    """A recursive-descent parser of the tokens of an expression."""

    def __init__(self, text: str) -> None:
        self.tokens = [match[1] for match in TOKEN.finditer(text)]
        # tokens that white space follows: 1 1/2
        self.apart = {n for n, match in enumerate(TOKEN.finditer(text)) if match[0] != match[0].rstrip()}
        self.at = self.depth = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str) -> None:
        if self.next != token:
            raise NoValue
        self.at += 1

    def sum(self) -> Value:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise NoValue
        value = self.product()
        while self.next in ("+", "-"):
            sign = self.next
            self.at += 1
            more = self.product()
            value = _plus(value, more if sign == "+" else _minus(more))
        self.depth -= 1
        return value

    def product(self) -> Value:
        if self.next in ("+", "-"):
            negative = self.next == "-"
            self.at += 1
            value = self.product()
            return _minus(value) if negative else value
        value = self.mixed()
        while True:
            if self.next in TIMES:
                self.at += 1
                value = _times(value, self.signed())
            elif self.next in ("/", "\\div"):
                self.at += 1
                value = _over(value, self.signed())
            elif self.next in ("(", "\\sqrt", "\\pi", "\\frac"):
                value = _times(value, self.factor())
            else:
                return value

    def signed(self) -> Value:
        if self.next == "-":
            self.at += 1
            return _minus(self.signed())
        return self.factor()

    def mixed(self) -> Value:
        r"""A factor, or a mixed number, which is a whole number and a fraction: 3\frac12, 3 1/2."""
        whole, at = self.next, self.at
        if whole.isdecimal():
            self.at += 1
            if self.next == "\\frac" and (parts := self.whole_fraction()):
                return _plus(Fraction(whole), Fraction(*parts))
            ahead = self.tokens[self.at : self.at + 3]
            if at in self.apart and len(ahead) == 3 and ahead[1] == "/" and (ahead[0] + ahead[2]).isdecimal():
                self.at += 3
                return _plus(Fraction(whole), _over(Fraction(ahead[0]), Fraction(ahead[2])))
            self.at = at
        return self.factor()

    def whole_fraction(self) -> tuple[int, int] | None:
        r"""Reads the \frac at this place if its numerator and denominator are whole numbers; returns both.

        Otherwise returns None, and reads nothing.
        """
        at = self.at
        self.at += 1
        try:
            parts = [self.argument() for _ in range(2)]
        except NoValue:
            parts = []
        if len(parts) == 2 and all(isinstance(part, Fraction) and part.denominator == 1 for part in parts):
            top, bottom = (int(part) for part in parts)
            if top >= 0 and bottom > 0:
                return top, bottom
        self.at = at
        return None

    def factor(self) -> Value:
        value = self.atom()
        if self.next != "^":
            return value
        self.at += 1
        if self.next == "-":
            self.at += 1
            return _power(value, _minus(self.argument()))
        return _power(value, self.argument())

    def atom(self) -> Value:
        token = self.next
        if token in ("(", "{", "["):
            self.at += 1
            value = self.sum()
            self.take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        self.at += 1
        if token == "\\pi":
            return PI
        if token == "\\frac":
            top = self.argument()
            return _over(top, self.argument())
        if token == "\\sqrt":
            n: Value = Fraction(2)
            if self.next == "[":
                self.at += 1
                n = self.sum()
                self.take("]")
            if not isinstance(n, Fraction) or n.denominator != 1:
                raise NoValue
            return _root(self.argument(), int(n))
        if token[:1].isdecimal() or token[:1] == ".":
            return self.number(token)
        raise NoValue

    def number(self, token: str) -> Fraction:
        digits = token.replace(",", "").rstrip(".")
        if len(digits) > MOST_DIGITS:
            raise NoValue
        return Fraction(digits)

    def argument(self) -> Value:
        r"""The value of a TeX argument: a group in braces, or a single digit: \frac12 is a half."""
        token = self.next
        if token[:1].isdecimal() and len(token) > 1:  # its first digit alone
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
            self.apart = {n + (n >= self.at) for n in self.apart}
        return self.atom()
