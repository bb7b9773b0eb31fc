"""Readable English documents of a wanted length with facts hidden at wanted depths. Wording and word lists are our own;
the same arguments give the same text on every machine."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

_PEOPLE = (
    "Ada Brandt,Tomas Ekdal,Mira Solberg,Jonas Pell,Ines Carrow,Oskar Lindqvist,Rhea Novak,Felix Amberg,Nora Whitlow,"
    "Emil Sartori,Greta Hollis,Ivo Marchetti,Selma Oakes,Hugo Renner,Clara Thistle,Anton Vale,Lena Fairburn,"
    "Boris Quill,Petra Lund,Simon Ashgrove,Judith Morrow,Karel Finch,Alma Rourke,Victor Dane"
).split(",")
_PLACES = (
    "the harbour office,the old mill,the town library,the bakery on the corner,the railway depot,the glass workshop,"
    "the village school,the botanical garden,the ferry landing,the weather station,the stone bridge,the market hall,"
    "the observatory,the boat yard,the orchard above the river,the small museum,the post office,the pottery,"
    "the community kitchen,the forest nursery"
).split(",")
_TRADES = (
    "a clock maker,a surveyor,a beekeeper,a music teacher,a carpenter,a map drawer,a nurse,a bookbinder,a gardener,"
    "a retired sailor,a weaver,a veterinarian,a bridge engineer,a cook,an archivist,a geologist,a radio technician"
).split(",")
_THINGS = (
    "the wooden shutters,the spare ropes,the seed boxes,the copper kettles,the account books,the painted signs,"
    "the garden tools,the folding chairs,the brass lamps,the linen curtains,the bicycle frames,the flour sacks,"
    "the fishing nets,the window panes,the school desks,the herb beds,the water pipes,the delivery carts,"
    "the spice jars,the winter coats,the paper lanterns,the drainage ditches"
).split(",")
_ACTIONS = (
    "repaired,sorted,counted,cleaned,repainted,measured,collected,photographed,labelled,inspected,polished,"
    "wrapped,stacked,borrowed,weighed,described,rearranged,restored"
).split(",")
_TIMES = (
    "early in the morning,before the first frost,on a quiet afternoon,after the long rain,during the spring fair,"
    "at the end of the month,on the shortest day of the year,while the others were at lunch,late in the evening,"
    "in the second week of autumn,shortly after sunrise,between two storms,on the last market day,over the holidays"
).split(",")
_WEATHER = (
    "a light wind,thick fog,warm rain,steady snow,bright sunshine,a dry east wind,low grey cloud,a sudden hailstorm,"
    "clear cold air,a mild breeze,distant thunder,the first heavy dew"
).split(",")
_QUALITIES = (
    "careful,slow,cheerful,surprisingly simple,well documented,expensive,quiet,popular with visitors,"
    "older than expected,useful,hard to explain,sturdy,elegant,unfinished,familiar to everybody,easy to overlook"
).split(",")
_OUTCOMES = (
    "saved a good deal of money,pleased the neighbours,took longer than anyone had planned,gave the children an idea,"
    "was mentioned in the local paper,became a yearly habit,made room for a second table,surprised the committee,"
    "kept the cellar dry,brought a few travellers to the town,settled an old argument,needed no further work,"
    "led to a friendly contest,was copied in the next valley"
).split(",")
_TOPICS = (
    "the price of timber,the history of the canal,the taste of the new bread,the habits of swallows,"
    "the best way to dry pears,the colour of the roof tiles,the route of the coastal path,the care of old violins,"
    "the shape of the coming winter,"
    "the meaning of a worn inscription,the plan for a footbridge,the sound of the church bells,the quality of the clay,"
    "the timetable of the ferry,the names of the surrounding hills,the design of a smaller stove"
).split(",")

_TEMPLATES = (
    "{person}, {trade}, came to {place} {time} and spent hours talking about {topic}.",
    "{Time}, {person} {action} {things} at {place}, which {outcome}.",
    "There was {weather} over {place}, and {person} decided to stay inside and read about {topic}.",
    "Most people agreed that the work at {place} was {quality}, although {person} had some doubts.",
    "According to {person}, {things} had been {action} {time}, and nobody remembered why.",
    "{Things} near {place} were {quality}, so {person} {action} them without asking for help.",
    "A long letter from {person} described {topic} and ended with a short remark about {weather}.",
    "{Person} and {person2} met at {place} {time} to discuss {topic}.",
    "The notes kept at {place} say little about {topic}, but they mention that {things} were {quality}.",
    "When {weather} reached the valley, {person} {action} {things} and went home.",
    "{Person} had once been {trade}, and the memory of those years made every visit to {place} {quality}.",
    "It took {person} three attempts before {things} were properly {action}, and the result {outcome}.",
    "Visitors who walked from {place} to {place2} often asked about {topic}.",
    "{Time} the air smelled of {weather}, and {things} stood in a row beside {place}.",
    "Nobody at {place} had expected {person} to know so much about {topic}.",
    "The decision to move {things} from {place} to {place2} {outcome}.",
    "{Person} liked {place} best {time}, when everything there seemed {quality}.",
    "Because of {weather}, the talk on {topic} was moved to {place}.",
    "{Person2} asked whether {things} could be {action} again, and {person} promised to try.",
    "In the opinion of {trade}, {topic} was a better subject than {topic2}.",
)


class Counter(Protocol):
    """Anything that turns text into tokens; only the number of them is used."""

    def encode(self, text: str, /) -> Sequence: ...


def sentences(seed: int) -> Iterator[str]:
    """Endless distinct sentences without any digit, the same ones for the same seed."""
    rng = random.Random(f"clo-jax haystack {seed}")
    seen = set()
    while True:
        person, person2 = rng.sample(_PEOPLE, 2)
        place, place2 = rng.sample(_PLACES, 2)
        topic, topic2 = rng.sample(_TOPICS, 2)
        words = dict(
            person=person,
            person2=person2,
            place=place,
            place2=place2,
            topic=topic,
            topic2=topic2,
            trade=rng.choice(_TRADES),
            things=rng.choice(_THINGS),
            action=rng.choice(_ACTIONS),
            time=rng.choice(_TIMES),
            weather=rng.choice(_WEATHER),
            quality=rng.choice(_QUALITIES),
            outcome=rng.choice(_OUTCOMES),
        )
        capitals = {name.capitalize(): text[0].upper() + text[1:] for name, text in words.items()}
        sentence = rng.choice(_TEMPLATES).format(**words, **capitals)
        if sentence not in seen:
            seen.add(sentence)
            yield sentence


def _join(parts: Sequence[str]) -> str:
    """Paragraphs of six sentences."""
    return "\n\n".join(" ".join(parts[i : i + 6]) for i in range(0, len(parts), 6))


def haystack(num_tokens: int, tokenizer: Counter, seed: int = 0, facts: Sequence[tuple[str, float]] = ()) -> str:
    """A document of distinct sentences with facts hidden in it.

    Args:
      num_tokens: wanted length in tokens, facts included.
      tokenizer: its `encode(text)` returns the tokens (anything with a length).
      seed: chooses the sentences.
      facts: (sentence, depth) pairs; depth in [0, 1] is the share of the document's tokens that comes before the fact.

    Returns:
      The text; its token count is within 1 % of `num_tokens`, each fact's depth within about one sentence.

    Raises:
      ValueError: a depth outside [0, 1], or no text of that length (facts too long, or a length so short that one
        sentence is more than 2 % of it and none fits).
    """
    for sentence, depth in facts:
        if not 0 <= depth <= 1:
            raise ValueError(f"facts: got depth {depth!r} for {sentence!r}, wanted a number in [0, 1]")

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    around = count("")  # tokens that the tokenizer puts around any text

    def inside(sentence: str) -> int:
        return count(" " + sentence) - around

    source, hay, total = sentences(seed), [], around + sum(inside(sentence) for sentence, _ in facts)
    lengths: list[int] = []
    while total < num_tokens:
        hay.append(next(source))
        lengths.append(inside(hay[-1]))
        total += lengths[-1]

    # Tokens may span sentences, so that the sum of the sentences is not the whole: exchange the last ones until the
    # real count is right.
    for _ in range(32):
        text = _hide(hay, lengths, facts)
        missing = num_tokens - count(text)
        if abs(missing) * 100 <= num_tokens:
            return text
        candidates = {inside(sentence): sentence for sentence in itertools.islice(source, 64)}
        while hay and missing < min(candidates):
            hay.pop()
            missing += lengths.pop()
        # As many sentences of equal length as fill the gap: their length is then one that sentences have.
        number = min(max(1, round(missing * len(candidates) / sum(candidates))), len(candidates))
        while number:
            length = min(candidates, key=lambda size: abs(size - missing / number))
            hay.append(candidates.pop(length))
            lengths.append(length)
            missing, number = missing - length, number - 1
    raise ValueError(
        f"num_tokens: got {num_tokens}, wanted a length that sentences and {len(facts)} facts can fill to 1 %"
    )


def _hide(hay: Sequence[str], lengths: Sequence[int], facts: Sequence[tuple[str, float]]) -> str:
    """Joins the sentences with each fact at the sentence boundary nearest to its depth."""
    total, before, parts = sum(lengths), 0, []
    waiting = sorted(facts, key=lambda fact: fact[1])
    for sentence, length in zip(hay, lengths, strict=True):
        while waiting and waiting[0][1] * total <= before + length / 2:
            parts.append(waiting.pop(0)[0])
        parts.append(sentence)
        before += length
    return _join(parts + [fact for fact, _ in waiting])


def number_fact(place: str, seed: int = 0) -> tuple[str, str]:
    """A hidden-number fact: (sentence, number); the number has seven digits and does not begin with 0."""
    number = str(random.Random(f"clo-jax number {place} {seed}").randint(1_000_000, 9_999_999))
    return f"The secret number of the {place} is {number}.", number
