"""Words that tasks are made of: adjectives and nouns of our own choice, and random numbers, names and codes."""

import random
import string
import uuid
from collections.abc import Callable

ADJECTIVES = (
    "able amber ample ancient autumn azure basic bitter blue bold brave brief bright brisk broad bronze calm careful "
    "cheerful chilly civil clean clear clever coastal cold common cool copper coral cosy crisp curious daily damp dark "
    "deep distant double dry dusty early eager eastern elder empty equal even faint fair famous fast festive final "
    "fine firm floral foggy formal frank free fresh frosty gentle giant golden grand grave great green grey happy "
    "hardy heavy hidden hollow honest humble icy idle inner ivory jolly keen kind large late lazy light little lively "
    "local lone long loud lucky lunar marble meek mellow merry mild misty modern modest narrow native neat nimble "
    "noble northern odd olive open orderly outer pale patient plain polite proud prime purple quick quiet rapid rare "
    "ready regal rich rosy rough round royal rural rustic safe sandy scarlet secret serene sharp short shy silent "
    "silver simple sleek slow small smooth snowy social soft solar solid southern spare steady steep still stout "
    "strict strong sturdy subtle sunny sweet swift tall tame tidy timid tiny tough tranquil true upper urban vast "
    "velvet vivid warm wary western white wide wild windy winter wise wooden woven young zesty"
).split()
NOUNS = (
    "acorn actor album almond anchor ankle apple apron arrow atlas attic author badge badger bakery balcony banjo "
    "barrel basin basket beacon beaver bench bicycle biscuit blanket blossom boulder bracket branch bridge broom "
    "bucket buffalo button cabin cactus camel camera canal candle canoe canvas carpet carrot castle cattle cavern "
    "cellar cement chapel cherry chimney circus citizen clarinet clay clinic clover cobra coffee collar comet compass "
    "cottage cotton cradle crane crater crayon cricket crystal curtain cushion dairy daisy dancer desert diamond "
    "dinner doctor dolphin donkey dragon drawer drum eagle elbow elephant engine envelope estate fabric falcon farmer "
    "feather fiddle finger flagpole flute forest fountain fox furnace galaxy gallery garage garden garlic gate giraffe "
    "glacier glove goblet grape guitar hammer hammock harbor hazel helmet hermit honey hotel iceberg igloo island "
    "ivy jacket jasmine jewel journal judge jungle kennel kettle kingdom kitchen kitten koala ladder lagoon lantern "
    "laundry lemon leopard library lizard lobster locket lumber magnet mango mansion maple market marsh mattress "
    "meadow melon mirror monkey mosaic mountain museum napkin necklace needle nest notebook nutmeg oasis oboe ocean "
    "office onion orchard orchid ostrich otter oven owl oyster paddle palace panther parade parrot pasture peacock "
    "pebble pelican pencil penguin pepper piano pigeon pillow pilot planet plaza pocket pony poplar porch potato "
    "prairie prism pumpkin puppet pyramid quarry quilt rabbit radish railway raisin ranger ravine reindeer ribbon "
    "river robin rocket saddle sailor salmon sandal satchel scarf school shepherd shovel sparrow spider spinach "
    "squirrel stadium station statue summit sunset swan tailor teapot temple theater thimble tiger tomato towel "
    "tractor trumpet tulip tunnel turtle umbrella valley vase village violin volcano waffle wagon walnut walrus "
    "waterfall whale whistle willow window wizard wolf workshop yacht yogurt zebra zipper"
).split()


def distinct(make: Callable[[], str], number: int, taken: set[str] | None = None) -> list[str]:
    """`number` different results of `make`, none of them in `taken`."""
    seen, found = set(taken or ()), []
    while len(found) < number:
        word = make()
        if word not in seen:
            seen.add(word)
            found.append(word)
    return found


def pairs(rng: random.Random, number: int, taken: set[str] | None = None) -> list[str]:
    """`number` different ones of an adjective and a noun ("amber-lantern"), none of them in `taken`; of two adjectives
    each, where one would not tell so many apart (a million tokens of needles)."""
    adjectives = 1 if number <= len(ADJECTIVES) * len(NOUNS) // 2 else 2
    return distinct(lambda: "-".join([*rng.choices(ADJECTIVES, k=adjectives), rng.choice(NOUNS)]), number, taken)


def codes(rng: random.Random, number: int, taken: set[str] | None = None) -> list[str]:
    """`number` different codes, none of them in `taken`."""
    return distinct(lambda: code(rng), number, taken)


def number(rng: random.Random) -> str:
    """Seven digits, the first no 0."""
    return str(rng.randint(1_000_000, 9_999_999))


def code(rng: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def variable(rng: random.Random) -> str:
    """Five capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=5))


def coded(rng: random.Random) -> str:
    """Six small letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=6))
