"""pass@k without bias, mean@n and the share cut off: closed values, the definition itself, and large n."""

import itertools
import math
from fractions import Fraction

import pytest

from tmoe.post.estimates import estimates, pass_at_k


def test_published_values():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3, rel=1e-14)
    assert pass_at_k(10, 3, 5) == pytest.approx(11 / 12, rel=1e-14)  # .916667


def test_is_what_drawing_all_subsets_gives():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations(range(n), k))
            found = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(found, rel=1e-13, abs=0)


@pytest.mark.parametrize(("n", "c", "k"), [(3000, 7, 400), (5000, 1, 1), (4000, 1500, 3), (2000, 1999, 2)])
def test_large_n_is_exact_to_rounding(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-13)


def test_tiny_chances_keep_their_digits():
    assert pass_at_k(10**15, 1, 1) == pytest.approx(1e-15, rel=1e-12)
    assert pass_at_k(10**9, 3, 2) == pytest.approx(6e-9, rel=1e-8)


def test_ends():
    assert pass_at_k(5, 0, 5) == 0.0 and math.copysign(1, pass_at_k(5, 0, 5)) == 1
    assert pass_at_k(5, 1, 5) == 1.0 and pass_at_k(5, 5, 1) == 1.0
    for n, c, k in ((0, 0, 1), (5, 6, 1), (5, -1, 1), (5, 1, 0), (5, 1, 6)):
        with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}: must be"):
            pass_at_k(n, c, k)


def test_estimates_of_an_evaluation():
    """Two prompts of four samples, one of one; a sample without a reward counts for neither estimate."""
    prompts = [7, 7, 7, 7, 9, 9, 9, 9, 8]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, None, 0.5, float("nan"), 1.5]
    finishes = ["stop"] * 6 + ["length"] * 3
    found = estimates(prompts, rewards, finishes, [1, 2, 8])
    assert found["mean@4"] == pytest.approx((0.5 + 0.25 + 1.5) / 3)
    assert found["truncated"] == pytest.approx(1 / 3)
    assert found["pass@1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["pass@2"] == pytest.approx((1 - 1 / 6 + 0) / 2)  # not of the prompt with one sample
    assert math.isnan(found["pass@8"])
    assert estimates(prompts, rewards, finishes, [1], right=0.5)["pass@1"] == pytest.approx(
        (0.5 + 0.5 + 1) / 3
    )


def test_estimates_of_nothing():
    assert all(math.isnan(value) for value in estimates([], [], [], [1]).values())
    with pytest.raises(ValueError, match="1 prompts, 2 rewards, 1 finishes: must be as many of each"):
        estimates([1], [1.0, 2.0], ["stop"], [1])
