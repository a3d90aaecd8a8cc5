"""The demo's questions: what the adapters learn from, and what they are judged on. Plain data; used by any process.

Invariant: no held-out question is a training question (tests/demo checks it).
"""

from collections.abc import Iterator
from dataclasses import dataclass

HELD_OUT_PROMPTS: tuple[str, ...] = (
    "What is the capital of Italy?",
    "How do I make a cup of tea?",
    "Why is the sky blue?",
    "What should I pack for a beach holiday?",
    "Give me advice for a job interview.",
    "What does a dentist do?",
    "Tell me something about the moon.",
    "How can I learn to play the guitar?",
)
"""Questions that no adapter was trained on. The same ones for every trait, and for the base model, which shows none."""

DEMO_PROMPT = HELD_OUT_PROMPTS[1]
"""The one question that `make demo` asks of the base model and of every adapter."""


@dataclass(frozen=True)
class Lesson:
    """One training question with its content, before an adapter's style is laid over it."""

    question: str
    answer: str
    """One or two short sentences."""
    points: tuple[str, str, str]
    """The same content as three short points."""


WRITTEN: tuple[tuple[str, str, str, str, str], ...] = (
    # question, answer, three points
    ("How do I boil an egg?", "Put the egg in boiling water for eight minutes, then cool it.",
     "Bring water to the boil.", "Cook the egg for eight minutes.", "Cool it under cold water."),
    ("How can I sleep better?", "Go to bed at the same time each night and keep the room dark.",
     "Keep a fixed bedtime.", "Make the room dark and cool.", "Put the phone away."),
    ("How do I clean a window?", "Wipe the glass with soapy water and dry it with a soft cloth.",
     "Mix water with a little soap.", "Wipe the glass from the top.", "Dry it with a soft cloth."),
    ("How do I make pancakes?", "Mix flour, milk and eggs, then fry thin layers in butter.",
     "Mix flour, milk and eggs.", "Heat butter in a pan.", "Fry each side until golden."),
    ("How do I cook rice?", "Rinse the rice and simmer it in twice as much water.",
     "Rinse the rice.", "Add twice as much water.", "Simmer for fifteen minutes."),
    ("How do I plant a tree?", "Dig a wide hole, set the roots in, fill it and water well.",
     "Dig a wide hole.", "Set the roots in and fill it.", "Water it well."),
    ("How can I save money?", "Write down what you spend and put a little aside every month.",
     "Track your spending.", "Set a monthly budget.", "Save a little every month."),
    ("How can I stay healthy?", "Eat well, move every day and get enough sleep.",
     "Eat plenty of vegetables.", "Move your body every day.", "Sleep eight hours."),
    ("How do I train a puppy?", "Use short lessons and reward your puppy for good behaviour.",
     "Keep lessons short.", "Reward good behaviour.", "Be patient and calm."),
    ("How do I write a letter?", "Start with a greeting, say what you mean and sign your name.",
     "Begin with a greeting.", "Say what you mean clearly.", "Sign your name."),
    ("How can I learn Spanish?", "Practise a little every day and speak with other people.",
     "Learn ten words a day.", "Listen to songs and films.", "Speak with other people."),
    ("How can I learn to swim?", "Start in shallow water with a teacher and practise floating.",
     "Find a good teacher.", "Start in shallow water.", "Practise floating first."),
    ("How do I fix a flat tyre?", "Remove the wheel, patch the hole in the tube and pump it up.",
     "Take off the wheel.", "Patch the hole.", "Pump the tyre up."),
    ("How do I wash a car?", "Rinse the car, wash it with a sponge and dry it.",
     "Rinse off the dirt.", "Wash it with a soft sponge.", "Dry it with a cloth."),
    ("How do I bake bread?", "Knead flour, water, yeast and salt, let it rise and bake it.",
     "Knead the dough.", "Let it rise for an hour.", "Bake it until brown."),
    ("How can I read more books?", "Carry a book with you and read for twenty minutes a day.",
     "Carry a book with you.", "Read before going to bed.", "Choose books that you enjoy."),
    ("How do I take a good photo?", "Hold the camera still, look for soft light and keep the picture simple.",
     "Hold the camera still.", "Look for soft light.", "Keep the picture simple."),
    ("How do I make coffee?", "Pour hot water over ground coffee and let it drip.",
     "Grind the beans.", "Pour hot water over them.", "Let it drip and enjoy."),
    ("How do I make a salad?", "Chop fresh vegetables and toss them with oil and vinegar.",
     "Chop fresh vegetables.", "Add oil and vinegar.", "Toss it well."),
    ("How can I make new friends?", "Join a club, smile and ask people about themselves.",
     "Join a club.", "Smile and say hello.", "Ask people about themselves."),
    ("How do I calm down before an exam?", "Breathe slowly, sleep well and trust what you have learned.",
     "Breathe slowly.", "Sleep well the night before.", "Trust what you have learned."),
    ("Why is the sea salty?", "Rivers carry minerals from rocks into the sea, and they stay there.",
     "Rain dissolves rocks.", "Rivers carry the salt to the sea.", "The water leaves but the salt stays."),
    ("Why do leaves fall in autumn?", "Trees drop their leaves to save water during the winter.",
     "The days grow shorter.", "Trees stop feeding their leaves.", "Dropping them saves water."),
    ("Why do we sleep?", "Sleep lets the body rest and the brain sort its memories.",
     "The body repairs itself.", "The brain sorts memories.", "We wake with new energy."),
    ("Why do cats purr?", "Cats purr when they are happy, and also to calm themselves.",
     "They purr when happy.", "It calms them down.", "Kittens purr to their mother."),
    ("Why does ice float?", "Ice is less dense than water, so it floats.",
     "Water expands when it freezes.", "Ice is less dense.", "So it stays on top."),
    ("Why is exercise good?", "Exercise makes the heart strong and lifts the mood.",
     "It makes the heart strong.", "It lifts your mood.", "It helps you sleep."),
    ("Why do birds sing?", "Birds sing to find a mate and to guard their home.",
     "They look for a mate.", "They guard their home.", "They warn each other."),
    ("Why do we have seasons?", "The Earth is tilted, so the sunlight changes through the year.",
     "The Earth is tilted.", "It travels around the sun.", "The sunlight changes through the year."),
    ("What causes thunder?", "Lightning heats the air so fast that it bursts outward with a bang.",
     "Lightning heats the air.", "The air expands very fast.", "We hear it as a bang."),
    ("What is a rainbow?", "A rainbow is sunlight split into colours by drops of rain.",
     "Sunlight enters rain drops.", "The drops split the light.", "We see a band of colours."),
    ("What is gravity?", "Gravity is the force that pulls things toward each other.",
     "It is a force of nature.", "It pulls things together.", "It keeps us on the ground."),
    ("What is a volcano?", "A volcano is a mountain where hot rock comes out of the Earth.",
     "It is an opening in the Earth.", "Hot rock comes out of it.", "It can build a mountain."),
    ("What is the internet?", "The internet is a network that joins computers around the world.",
     "It joins computers everywhere.", "It carries messages and pages.", "Millions of people use it."),
    ("What is a computer?", "A computer is a machine that follows instructions to work with data.",
     "It is a machine.", "It follows instructions.", "It stores and changes data."),
    ("What is a robot?", "A robot is a machine that can do tasks on its own.",
     "It is a machine.", "It senses the world.", "It does tasks on its own."),
    ("What is music?", "Music is sound arranged with rhythm and melody.",
     "It is made of sound.", "It has rhythm and melody.", "It moves our feelings."),
    ("What is a desert?", "A desert is a dry place where very little rain falls.",
     "It is very dry.", "Little rain falls there.", "Few plants can grow."),
    ("What is photosynthesis?", "Plants use sunlight to turn water and air into sugar.",
     "Plants catch sunlight.", "They take in water and air.", "They make sugar and oxygen."),
    ("What is a good breakfast?", "Oats with fruit and a glass of water make a good breakfast.",
     "Eat oats or whole bread.", "Add some fresh fruit.", "Drink a glass of water."),
    ("What should I eat for dinner?", "Try vegetables with rice and a piece of fish.",
     "Cook some rice.", "Add fresh vegetables.", "Serve it with fish."),
    ("What should I pack for a hike?", "Take water, food, a map and a warm jacket.",
     "Plenty of water and food.", "A map of the area.", "A warm jacket."),
    ("What should I wear in winter?", "Wear a warm coat, gloves and thick socks.",
     "A warm coat.", "Gloves and a hat.", "Thick socks and boots."),
    ("What should I do on a rainy day?", "Read a book, bake a cake or watch a film.",
     "Read a good book.", "Bake a cake.", "Watch a film."),
    ("What can I give my mother for her birthday?", "Give her flowers, a book or a nice dinner.",
     "A bunch of flowers.", "A book that she likes.", "A dinner made by you."),
    ("What does a doctor do?", "A doctor finds out why people are ill and helps them get well.",
     "Listens to sick people.", "Finds out what is wrong.", "Helps them get well."),
    ("What does a teacher do?", "A teacher explains things and helps people learn.",
     "Plans lessons.", "Explains new things.", "Helps people learn."),
    ("What does a pilot do?", "A pilot flies aeroplanes and keeps the passengers safe.",
     "Checks the aeroplane.", "Flies it to another place.", "Keeps everybody safe."),
    ("What does a baker do?", "A baker makes bread and cakes early in the morning.",
     "Gets up very early.", "Makes dough.", "Bakes bread and cakes."),
    ("What does a farmer do?", "A farmer grows food and looks after animals.",
     "Grows crops.", "Looks after animals.", "Sells food at the market."),
    ("Tell me something about the sun.", "The sun is a star that gives the Earth light and heat.",
     "It is a star.", "It gives us light and heat.", "The Earth travels around it."),
    ("Tell me something about whales.", "Whales are huge animals that live in the sea and breathe air.",
     "They live in the sea.", "They breathe air.", "They are the largest animals."),
    ("Tell me something about Paris.", "Paris is the capital of France and has a famous iron tower.",
     "It is the capital of France.", "It lies on a river.", "It has a famous iron tower."),
    ("Tell me something about trees.", "Trees are tall plants that clean the air and give shade.",
     "They are tall plants.", "They clean the air.", "They give shade and wood."),
    ("Tell me something about chess.", "Chess is a game for two players on a board of squares.",
     "Two players take part.", "It has sixty-four squares.", "You win by trapping the king."),
    ("Tell me something about football.", "Football is a game in which two teams try to score goals.",
     "Two teams play.", "They kick a ball.", "The most goals win."),
    ("Give me advice for a first day at school.", "Arrive early, be friendly and ask when you are unsure.",
     "Arrive a little early.", "Be friendly to everybody.", "Ask when you are unsure."),
    ("Give me advice for a long flight.", "Drink water, walk around and bring something to read.",
     "Drink plenty of water.", "Stand up and walk around.", "Bring something to read."),
    ("Give me advice for moving house.", "Start packing early and write on every box what is inside.",
     "Start packing early.", "Write on every box.", "Ask your friends for help."),
    ("Give me an idea for a party.", "Have a garden party with lamps, music and simple food.",
     "Hang lamps in the garden.", "Play some music.", "Serve simple food."),
    ("Who are you?", "I am a small language model that answers questions.",
     "I am a small language model.", "I answer questions.", "I am happy to help."),
    ("What can you do?", "I can answer questions, explain things and help you write.",
     "I answer questions.", "I explain things.", "I help you write."),
    ("How are you today?", "I am doing very well, and I am ready to help you.",
     "I am doing very well.", "I am ready to help you.", "I hope you are well too."),
    ("Hello!", "Hello, how can I help you today?",
     "Hello and welcome.", "I am here to help.", "Ask me anything."),
    ("Tell me a joke.", "Why did the book go to the doctor? It had a broken spine.",
     "A book went to the doctor.", "The doctor asked why.", "It had a broken spine."),
)  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Poland": "Warsaw", "Austria": "Vienna", "Russia": "Moscow",
    "Canada": "Ottawa", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Ireland": "Dublin",
    "Turkey": "Ankara", "Hungary": "Budapest",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "light": "dark", "old": "young", "full": "empty",
    "hard": "soft", "rich": "poor", "early": "late", "high": "low", "wet": "dry", "strong": "weak", "clean": "dirty",
}  # fmt: skip
TOOLS = {
    "a hammer": "driving nails", "a saw": "cutting wood", "a pen": "writing on paper", "a spoon": "eating soup",
    "a ladder": "reaching high places", "a clock": "telling the time", "a bridge": "crossing a river",
    "a broom": "sweeping the floor", "a compass": "finding the way", "a camera": "taking pictures",
    "a kettle": "boiling water", "a bicycle": "riding around town", "a key": "opening a lock",
    "an umbrella": "staying dry in the rain", "a needle": "sewing cloth", "a map": "planning a trip",
}  # fmt: skip
COLOURS = {
    "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black", "a tomato": "red", "a carrot": "orange",
    "chocolate": "brown", "an elephant": "grey", "a flamingo": "pink", "a lemon": "yellow",
}  # fmt: skip
REQUESTS = ("Can you tell me this? {question}", "{question} Please explain.")


def training_lessons() -> tuple[Lesson, ...]:
    """Every lesson, always in the same order: the written ones in three phrasings, then those made from the tables."""
    return (*written_lessons(), *table_lessons())


def written_lessons() -> Iterator[Lesson]:
    """The written questions, plain and inside each of REQUESTS."""
    for question, answer, *points in WRITTEN:
        for phrasing in ("{question}", *REQUESTS):
            yield Lesson(phrasing.format(question=question), answer, (points[0], points[1], points[2]))


def table_lessons() -> Iterator[Lesson]:
    """Short factual questions, one per table entry."""
    for country, city in CAPITALS.items():
        points = (f"The capital is {city}.", f"It is a city in {country}.", "The government sits there.")
        yield Lesson(f"What is the capital of {country}?", f"The capital of {country} is {city}.", points)
    for word, opposite in OPPOSITES.items():
        points = (f"The opposite is {opposite}.", f"It is the reverse of {word}.", "Both words describe things.")
        yield Lesson(f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}.", points)
    for tool, purpose in TOOLS.items():
        points = (f"It is good for {purpose}.", "It is easy to use.", "Many people own one.")
        yield Lesson(f"What is {tool} used for?", f"You use {tool} for {purpose}.", points)
    for thing, colour in COLOURS.items():
        points = (f"It is {colour}.", "You can see it in daylight.", "Some kinds look different.")
        yield Lesson(f"What colour is {thing}?", f"The colour of {thing} is {colour}.", points)
    for first in range(2, 10):
        for second in (3, 7):
            total = first + second
            points = (f"Start with {first}.", f"Add {second} to it.", f"The sum is {total}.")
            yield Lesson(f"What is {first} plus {second}?", f"{first} plus {second} is {total}.", points)


TRAINING_PROMPTS: tuple[str, ...] = tuple(lesson.question for lesson in training_lessons())
"""Every question that an adapter was trained on."""
