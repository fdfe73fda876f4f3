"""Values that fill the templates: names, places, things, times, and invented words.

Owns: the word lists and the draws. Does not own: wording. A third of the names and places are
invented from syllables, so that a model cannot learn them by heart and has to copy them from the
prompt.
"""

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """Ada Adam Aisha Alba Alex Alice Amir Amy Ana Anders Anna Arjun Aya Ben Bella Bruno Carla
    Carlos Chen Clara Dan Dana David Diego Dora Elena Eli Ella Emil Emma Erik Eva Fatima Felix
    Finn Flora Freya George Grace Greta Hana Hans Hugo Ida Igor Ines Iris Ivan Jack Jana Jonas
    Julia Kai Karim Karl Kate Kenji Lara Lars Laura Lea Leo Lily Lin Lisa Liam Lucas Lucy Luna
    Maja Marco Maria Mark Marta Max Maya Mei Mia Mila Nadia Nils Nina Noah Nora Olga Oliver Omar
    Oscar Pablo Paul Petra Priya Rafael Ravi Rosa Ruth Sam Sara Simon Sofia Sven Tara Theo Tim
    Tom Uma Vera Victor Vivi Wanda Will Yara Yuki Zara Zoe"""
)
CITIES = _words(
    """Paris London Berlin Madrid Rome Vienna Prague Oslo Athens Dublin Lisbon Warsaw Tokyo Osaka
    Seoul Beijing Shanghai Delhi Mumbai Cairo Nairobi Lagos Accra Tunis Toronto Boston Chicago
    Denver Dallas Austin Seattle Miami Lima Quito Bogota Santiago Havana Sydney Perth Geneva
    Zurich Milan Turin Naples Porto Seville Lyon Nice Hamburg Munich Cologne Leipzig Krakow
    Budapest Sofia Riga Tallinn Vilnius Helsinki Bergen Malmo Glasgow York Leeds Bath Cork Ghent
    Bruges Utrecht Basel Graz Split Tirana Baku Muscat Doha Hanoi Manila Jakarta Bali Dhaka
    Kathmandu Lahore Tehran Amman Beirut Haifa Tangier Dakar Kampala Lusaka Durban"""
)
THINGS = _words(
    """apple bread milk cheese rice tea coffee honey lemon onion carrot potato tomato banana orange
    grape melon cup plate spoon fork knife pot lamp chair table desk bed sofa pillow blanket
    book pen pencil paper bag box key coin ring watch hat coat scarf shoe boot sock glove shirt
    ball kite drum flute violin rope bell candle brush soap towel mirror basket bottle jar
    ladder hammer nail seed flower leaf stone shell feather map"""
)
ANIMALS = _words(
    """cat dog fox owl bear wolf frog duck goose hen horse cow goat sheep pig mouse rabbit hedgehog
    squirrel deer lion tiger monkey parrot penguin seal whale turtle snail bee ant crab otter
    badger mole swan crow robin"""
)
COLORS = _words("red blue green yellow orange purple black white brown grey pink gold silver")
JOBS = _words(
    """baker farmer teacher doctor nurse pilot painter singer writer gardener cook driver sailor
    builder tailor lawyer judge miner fisher dancer actor clerk barber potter weaver"""
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear", "hot", "cold")
_UNIT_PAIRS = (
    ("km", "miles"),
    ("kg", "pounds"),
    ("cm", "inches"),
    ("liters", "gallons"),
    ("meters", "feet"),
    ("grams", "ounces"),
    ("celsius", "fahrenheit"),
)
UNITS = _UNIT_PAIRS + tuple((target, source) for source, target in _UNIT_PAIRS)
"""(from, to)."""
TOPICS = _words(
    """planning budget design garden music dinner lunch project travel school yoga chess review
    dentist piano swimming team sales birthday science"""
)
_ONSETS = _words("b br c ch d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w z")
_VOWELS = _words("a e i o u ai ea oo")
_CODAS = ("", "", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk")


def draw_word(rng: Random) -> str:
    """An invented lower-case word of two or three syllables, for example `drelao`."""
    syllables = rng.choice((2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)
    ) + rng.choice(_CODAS)


def draw_name(rng: Random) -> str:
    """A first name, invented one time in three."""
    return draw_word(rng).capitalize() if rng.random() < 1 / 3 else rng.choice(NAMES)


def draw_city(rng: Random) -> str:
    """A city, invented one time in three."""
    return draw_word(rng).capitalize() if rng.random() < 1 / 3 else rng.choice(CITIES)


def draw_noun(rng: Random) -> str:
    """A thing or an animal, invented one time in five."""
    return draw_word(rng) if rng.random() < 0.2 else rng.choice(THINGS + ANIMALS)


def draw_nouns(rng: Random, count: int) -> list[str]:
    """`count` different nouns."""
    found: list[str] = []
    while len(found) < count:
        noun = draw_noun(rng)
        if noun not in found:
            found.append(noun)
    return found


def draw_number(rng: Random) -> int:
    """A positive integer below 1000; small ones are more frequent."""
    return rng.randint(1, rng.choice((9, 20, 99, 99, 999)))


def draw_time(rng: Random) -> str:
    """A time of day, `HH:MM`, on a multiple of five minutes."""
    return f"{rng.randint(6, 22):02d}:{rng.choice(range(0, 60, 5)):02d}"


def draw_code(rng: Random) -> str:
    """A code of letters and digits, for example `KX-482`."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
    return f"{letters}-{rng.randint(100, 999)}"
