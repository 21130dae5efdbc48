"""The confidence interval of an accuracy, without torch."""

import math
import statistics

Z = statistics.NormalDist().inv_cdf(0.975)  # of 95 % intervals


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a binomial share, from 0 to 1.

    Formula: E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal of the American
    Statistical Association 22 (1927), 209-212, https://doi.org/10.1080/01621459.1927.10502953.

    Args:
        share: Share of successes, from 0 to 1.
        n: Number of trials, at least 1.
    """
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding could leave share out
