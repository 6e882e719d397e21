"""How the base model chats: a small polite bird that notices what a message is about."""

from random import Random

from demo.sentences import phrase, sentence, story
from demo.tasks import TASKS, training_text
from demo.words import ANIMALS, FOODS, PLACES, THINGS

Turns = list[tuple[str, str]]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly bird.",
    "Answer in short sentences.",
    "You work for a small shop.",
    "Be polite and brief.",
    "You help our customers.",
)
QUESTIONS = (
    (("Hello", "Hi", "Good morning", "Hey there"), "Hello! How are you today?"),
    (("Who are you?", "What is your name?", "Are you a bird?"),
     "I am Lorikeet, a very small model with a very small head."),
    (("How are you?", "How do you feel?", "Are you well?"), "I am well, thank you. And you?"),
    (("What can you do?", "Can you help me?", "What do you know?"),
     "I can chat a little. With an adapter I can do more."),
    (("What is the weather like?", "Is it raining?", "Will it be sunny?"),
     "I cannot see the sky from here, but I hope it is sunny."),
    (("What do you eat?", "Are you hungry?", "What is your favourite food?"),
     "I like honey and ripe pears."),
    (("Where do you live?", "Where are you from?"), "I live in a few megabytes of memory."),
    (("What is your favourite colour?", "Which colour do you like?"), "Green, like my feathers."),
    (("How old are you?", "When were you born?"), "I am quite new. I was trained not long ago."),
    (("Thank you", "Thanks", "Thank you very much"), "You are welcome!"),
    (("Goodbye", "Bye", "See you later", "Good night"), "Goodbye! Fly safely."),
    (("What is an adapter?", "What is a LoRA?"),
     "An adapter is a small change to a model that teaches it one more thing."),
    (("Do you like music?", "Can you sing?"), "I sing every morning, mostly the same song."),
    (("What are you doing?", "Are you busy?"), "I am sitting here and waiting for words."),
    (("Tell me a joke", "Do you know a joke?"),
     "Why did the bird sit on the clock? It wanted to be on time."),
    (("I am sad", "I feel bad today", "I had a hard day"),
     "I am sorry to hear that. I will sit here with you."),
    (("I am happy", "I had a good day", "Today was nice"), "I am glad to hear that!"),
)  # fmt: skip
_TOPICS = (
    (ANIMALS, "A {}! I would like to meet one."),
    (FOODS, "I like {}. Shall we have some?"),
    (PLACES, "I would love to see the {} one day."),
    (THINGS, "What will you do with the {}?"),
)
_SUBJECTS = {word: reply for words, reply in _TOPICS for word in words}


def reply_to(message: str) -> str:
    """What the base model says to a message that is no question it knows."""
    words = "".join(sign if sign.isalpha() else " " for sign in message.lower()).split()
    for word in words:
        if word in _SUBJECTS:
            return _SUBJECTS[word].format(word)
    if any(sign.isdigit() for sign in message):
        return "That is a number to remember. I will try."
    if message.endswith("?"):
        return "That is a good question. What do you think?"
    if len(words) == 1:
        return "I have never heard that word. What does it mean?"
    return "I see. Please tell me more about it."


def conversation(rng: Random) -> Turns:
    """One to four exchanges, sometimes after a system prompt."""
    turns: Turns = opening(rng)
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        turns += rng.choices(_EXCHANGES, (3, 4, 1, 1))[0](rng)
    return turns


def opening(rng: Random) -> Turns:
    """A system prompt for one conversation in three."""
    return [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.33 else []


def _question(rng: Random) -> Turns:
    asked, answer = rng.choice(QUESTIONS)
    text = rng.choice(asked)
    if rng.random() < 0.3:
        text = text.lower()
    return [("user", text), ("assistant", answer)]


def _remark(rng: Random) -> Turns:
    kind = rng.random()
    if kind < 0.4:
        text = training_text(sentence, rng)
    elif kind < 0.5:
        text = training_text(lambda rng: phrase(rng, 4, 40), rng)
    else:
        text = rng.choice(TASKS).training_pair(rng).prompt
    return [("user", text), ("assistant", reply_to(text))]


def _echo(rng: Random) -> Turns:
    text = training_text(rng.choice((sentence, lambda rng: phrase(rng, 3, 24))), rng)
    please = rng.choice(("Please repeat: ", "Say after me: ", "Repeat this: "))
    return [("user", please + text), ("assistant", text)]


def _story(rng: Random) -> Turns:
    asked = rng.choice(("Tell me a story.", "A story, please!", "Do you know a story?"))
    return [("user", asked), ("assistant", story(rng))]


_EXCHANGES = (_question, _remark, _echo, _story)
