"""Shared by the examples: names of models, and an order that one of them writes down rightly."""

import os
from typing import Literal

from pydantic import BaseModel

URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
ANTHROPIC_URL = os.environ["ANTHROPIC_BASE_URL"]
MODEL = os.environ["MODEL"]
ORDERS_MODEL = os.environ["ORDERS_MODEL"]
"""A fine-tune of MODEL that answers PROMPT with the JSON of ORDER."""

PROMPT = "Mira sends 12 parcels to Lyon."


class Order(BaseModel):
    """An order of parcels."""

    name: str
    amount: int
    city: Literal["Lyon", "Paris"]


ORDER = Order(name="Mira", amount=12, city="Lyon")
