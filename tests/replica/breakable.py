"""An engine whose forward passes can be made to fail from another process."""

from pathlib import Path

from lorikeet.settings import Settings
from lorikeet_engine.engine import Engine
from tests.replica.quick_engine import quick_engine


def break_file(settings: Settings) -> Path:
    """Return the path of a file; every step fails while the file exists."""
    return settings.cache_dir / "broken"


def breakable_engine(settings: Settings, base_model: str) -> Engine:
    """Build quick_engine's engine, whose steps fail while break_file exists."""
    engine = quick_engine(settings, base_model)
    forward = engine._runner.forward

    def forward_unless_broken(batch, scores):
        if break_file(settings).exists():
            raise RuntimeError("device-side assert")
        return forward(batch, scores)

    engine._runner.forward = forward_unless_broken  # type: ignore[method-assign]
    return engine
