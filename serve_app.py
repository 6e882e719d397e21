"""Ray Serve application of a clone and of the container image: `serve run serve_app:app`."""

from lorikeet.serving.application import app

__all__ = ["app"]
