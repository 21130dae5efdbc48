"""Synthetic film reviews from a seed, with a spread of lengths like IMDb's, for runs without a network."""

import random
import re

MEDIAN_WORDS, LOG_SIGMA, MOST_WORDS = 58, 0.64, 700  # a third of IMDb's median, its spread (0.645 of the logarithm)
P_LEAN = 0.72  # probability that most aspects share the verdict on the film
P_ASPECT = 0.8  # probability that one aspect shares the opinion of most aspects
P_NEGATED = 0.2  # probability that a judgement is a negated opposite
P_FILLER = 0.5  # probability of a neutral sentence
P_OPENING, P_ADVICE = 0.4, 0.3
LABEL_NOISE = 0.03  # probability of a wrong label
ADJECTIVES = (  # negative, positive
    "bad awful dull boring clumsy forgettable tedious weak lifeless dreadful silly predictable terrible tiresome",
    "good great superb brilliant charming clever moving memorable gripping wonderful delightful strong fresh witty",
)
WORDS = {
    "film": "film|movie|picture",
    "very": "|||really |quite |rather |truly |simply |very ",
    "not": "not |hardly |never |far from |anything but |by no means ",
    "not_a": "not |hardly |by no means |far from |anything but ",
    "is": "is|was|seems|felt",
    "aspect": "acting|plot|music|script|photography|dialogue|pacing|editing|direction|ending|opening|cast|humour|"
    "soundtrack|camera work|set design|romance|villain|lead actress|supporting cast",
    "who": "young teacher|retired detective|lonely widow|failed musician|country doctor|taxi driver|war reporter|"
    "small-time thief|shy student|ship's cook|former boxer|village priest",
    "place": "Lisbon|a mining town|Chicago|a Norwegian harbour|a border village|Naples|the desert|Montreal|Kyoto|"
    "an island|post-war Berlin|the suburbs",
    "event": "inherits an old house|finds a bag of money|meets an old friend|loses a brother|takes a new job|"
    "receives an unsigned letter|witnesses a crime|misses a train|adopts a dog|opens a restaurant",
    "when": "on a Tuesday evening|last weekend|on a long flight|at a small festival|with my sister|on television|"
    "with two friends|after work|on a rainy afternoon|in a half-empty cinema",
    "number": "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty",
}
FILLERS = (
    "I saw it {when}.|The story is about a {who} who {event} in {place}.|It runs for {number} quarters of an hour.|"
    "A {who} from {place} {event}, and a {who} gets involved.|Most of it was shot in {place} over {number} weeks.|"
    "The director has made {number} other films, one of them set in {place}.|My neighbour, a {who}, told me about it.|"
    "Then, {number} years later, the {who} {event}.|There is a book behind it, which I read {when}.|"
    "Halfway through, the {who} leaves for {place} and {event}.|The scene with the {who} comes after {number} minutes."
)
ASPECTS = (
    "The {aspect} {is} {a}.|I found the {aspect} {a}.|To me the {aspect} {is} {a}, and the {aspect} {is} {a}.|"
    "The {aspect} {is} {a}, but the {aspect} {is} {b}.|While the {aspect} {is} {b}, the {aspect} {is} {a}.|"
    "Some will call the {aspect} {a}.|The {aspect} in the scene with the {who} {is} {a}."
)
VERDICTS = (
    "All in all, this is {an} {film}.|As a whole, the {film} {is} {a}.|In the end, it is {an} {film}.|"
    "Although the {aspect} {is} {b}, the {film} as a whole {is} {a}.|Overall, I would call the {film} {a}.|"
    "The {film} as a whole {is} {a}, even if the {aspect} {is} {b}.|My verdict on the {film} as a whole: {a}.|"
    "The {aspect} {is} {b}, and yet, all in all, it is {an} {film}."
)
OPENINGS = (
    "This is {an} {film}.|On the whole I found this {film} {a}.|Let me say it at once: as a whole, the {film} is {a}."
)
ADVICE = (  # negative, positive
    "Save your money.|Do not go and see it.|I will not watch it again.|I cannot recommend it.|Give it a miss.",
    "Do not miss it.|Go and see it.|I will watch it again.|I can recommend it.|It is worth the money.",
)


def synthetic_reviews(count: int, seed: int) -> tuple[list[str], list[int]]:
    """Make English film reviews and their labels (0 negative, 1 positive); a higher count extends the same list.

    A review praises some aspects of a film and criticises others, with neutral sentences in between, and ends with a
    verdict on the whole film. The verdict alone decides the label. The aspects only tend towards it, both use the same
    words, and both may be negated ("hardly a good film", "never dull"). So counting words fails in a quarter of the
    reviews. The number of words is log-normal with the spread of IMDb's and a third of its median.
    """
    rng = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        opinion = rng.randrange(2)
        texts.append(_review(rng, opinion))
        labels.append(opinion ^ (rng.random() < LABEL_NOISE))
    return texts, labels


def _review(rng: random.Random, opinion: int) -> str:
    words = min(rng.lognormvariate(0.0, LOG_SIGMA) * MEDIAN_WORDS, MOST_WORDS)
    lean = opinion ^ (rng.random() >= P_LEAN)
    sentences = [_sentence(rng, OPENINGS, opinion)] if rng.random() < P_OPENING else []
    sentences.append(_sentence(rng, VERDICTS, opinion))
    if rng.random() < P_ADVICE:
        sentences[-1] += " " + rng.choice(ADVICE[opinion].split("|"))
    while sum(map(len, sentences)) < 5.6 * words:
        filler = rng.random() < P_FILLER
        judged = lean ^ (rng.random() >= P_ASPECT)
        sentences.insert(-1, _sentence(rng, FILLERS if filler else ASPECTS, judged))
    return " ".join(sentences)


def _sentence(rng: random.Random, templates: str, opinion: int) -> str:
    """Fill in a template: {a} is a judgement with this opinion, {an} also before a noun, {b} the opposite."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name not in ("a", "an", "b"):
            return rng.choice(WORDS[name].split("|"))
        negated = rng.random() < P_NEGATED
        adjective = rng.choice(ADJECTIVES[opinion ^ (name == "b") ^ negated].split())
        start = rng.choice(WORDS["not_a" if name == "an" else "not"].split("|")) if negated else ""
        adjective = adjective if negated else rng.choice(WORDS["very"].split("|")) + adjective
        if name == "an":
            start += "an " if adjective[0] in "aeiou" else "a "
        return start + adjective

    return re.sub(r"\{(\w+)\}", fill, rng.choice(templates.split("|")))
