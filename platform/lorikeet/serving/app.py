"""The deployments: plain classes, wrapped once."""

import json
from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from lorikeet.api.app import Services, create_app
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store import open_store
from lorikeet.serving.controller import Controller
from lorikeet.serving.engines import ServeEngines
from lorikeet.serving.replica import Replica
from lorikeet.settings import Settings

_LONGEST_GENERATION_S = 600  # how long a replica that is replaced may finish what it streams
