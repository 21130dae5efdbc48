"""What charts are drawn from: smoothed losses, confidence intervals and the marks of an axis."""

import math

from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.parsing import Point

Z95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
HALF_LIFE = 0.05  # of the longest curve
MOST_POINTS = 600


def wilson_interval(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Return the confidence interval of a binomial share, from 0 to 1.

    Formula: E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal of the American
    Statistical Association 22 (1927), 209-212, https://doi.org/10.1080/01621459.1927.10502953.

    Args:
        share: Share of successes, from 0 to 1.
        n: Number of trials, at least 1.
        z: Quantile of the normal distribution; the default gives 95 %.
    """
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy_interval(row: Row) -> tuple[float, float] | None:
    """Return the 95 % interval of a row's test accuracy in percent, None where the number of test samples is not known.

    Of several seeds it is that of their mean on the one test set: the seeds do not make the test set larger.
    """
    mean, sizes = row.mean("test_accuracy"), {run.test_samples for run in row.runs}
    if mean is None or len(sizes) != 1 or not (n := sizes.pop()):
        return None
    low, high = wilson_interval(mean / 100, n)
    return low * 100, high * 100


def smooth(x: list[float], y: list[float], half_life: float) -> list[float]:
    """Return the exponential moving average of `y`, whose weights halve every `half_life` of `x`.

    The weights of each point sum to one, so that the first points do not lean towards 0: D. P. Kingma and J. Ba, Adam
    (2015), section 3, https://arxiv.org/abs/1412.6980.
    """
    total = weight = 0.0
    averages = []
    before = x[0] if x else 0.0
    for place, value in zip(x, y, strict=True):
        decay = 0.5 ** ((place - before) / half_life) if half_life > 0 else 0.0
        total, weight, before = total * decay + value, weight * decay + 1, place
        averages.append(total / weight)
    return averages


class Curve:
    """A run's losses against samples (or epochs) seen.

    Attributes:
        row: Number of its row, from 0.
        x: Samples seen, or epochs.
        raw: Losses as printed.
        smoothed: Their moving average.
    """

    def __init__(self, row: int, points: list[Point], of_samples: bool):
        points = [point for point in points if math.isfinite(point.loss)]
        self.row = row
        self.x = [point.samples if of_samples else point.epochs for point in points]
        self.raw = [point.loss for point in points]
        self.smoothed: list[float] = []


def loss_curves(rows: list[Row]) -> tuple[list[Curve], str]:
    """Return a curve for each run that printed losses, and what its x axis counts.

    It counts samples where all runs tell them, epochs otherwise: a log of batches does not tell how many are in one.
    """
    runs = [(number, run) for number, row in enumerate(rows) for run in row.runs if run.losses]
    of_samples = all(point.samples is not None for _, run in runs for point in run.losses)
    curves = [Curve(number, run.losses, of_samples) for number, run in runs]
    curves = [curve for curve in curves if curve.x]
    longest = max((curve.x[-1] for curve in curves), default=0)
    for curve in curves:
        curve.smoothed = smooth(curve.x, curve.raw, HALF_LIFE * longest)
    return curves, "samples seen" if of_samples else "epochs"


def thin(x: list[float], y: list[float]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points, the lowest and the highest of each stretch among them."""
    points = list(zip(x, y, strict=True))
    if len(points) <= MOST_POINTS:
        return points
    length = math.ceil(len(points) / (MOST_POINTS // 2))
    kept = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between `low` and `high`, at most eight if powers of ten allow it."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks: list[float] = []
    for factors in (range(1, 10), (1, 2, 3, 5, 7), (1, 2, 5), (1,)):
        marks = [float(f"{factor * 10.0**power:.1g}") for power in powers for factor in factors]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= 8:
            break
    return marks


def short(value: float) -> str:
    """Write an axis mark."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
