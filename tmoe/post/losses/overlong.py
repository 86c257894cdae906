"""What becomes of answers that were cut off: a penalty that begins early, or no part in the loss."""

from torch import Tensor


def overlong_penalty(tokens_N: Tensor, longest: int, margin: int) -> Tensor:
    """What is added to the reward of answers of n tokens: 0, then ((longest - margin) - n) / margin, then -1.

    It falls from 0 to -1 over the last `margin` tokens before `longest`. DAPO, Yu et al. 2025, arXiv
    2503.14476, equation 13.
    """
    if not 0 < margin <= longest:
        raise ValueError(f"margin={margin}: must be above 0 and at most longest={longest}")
    return ((longest - margin - tokens_N.float()) / margin).clamp(-1.0, 0.0)


def without_truncated(mask_T: Tensor, segments_T: Tensor, truncated_N: Tensor) -> Tensor:
    """The mask without the tokens of sequences that were cut off: out of the loss, not out of attention."""
    return mask_T * ~truncated_N[segments_T]
