"""Every error the engine raises.

EngineError
├── SettingsError        settings that contradict each other or do not fit the machine
├── InvalidRequest       a request that can never run: too long, bad sampling values
├── EngineOverloaded     waited longer than it may, or would: `retry_after_s` says when to come back
├── EngineClosed         submitted after close, or the engine died
├── StepFailed           the forward pass this request was part of raised
├── NotFinite            the logits of this request overflowed
├── DeviceLost           the device can no longer be used; only a new process can
├── ShapeError           tensors handed to an operator do not fit together
├── ModelError           a base model folder that cannot be loaded
└── AdapterError         carries the adapter's label
    ├── AdapterRejected  a file that is not an acceptable adapter, with `field` and reason
    ├── AdapterTooLarge  a rank or a size above the configured limit
    ├── AdapterNotReady  still on its way when the request would wait no longer
    ├── AdapterLoadFailed  an accepted adapter that could not be brought to the GPU
    └── AdapterDamaged   weights that changed in memory under requests

All are picklable: they cross process borders as they are.
"""

from typing import Any


class EngineError(Exception):
    """Base of the tree. Keyword fields become attributes and survive pickling."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))


def _rebuild(kind: type[EngineError], message: str, fields: dict[str, Any]) -> EngineError:
    return kind(message, **fields)


class SettingsError(EngineError):
    """Settings that contradict each other, the model or the memory there is."""


class InvalidRequest(EngineError):
    """A request that can never run. `param` names the offending field."""


class EngineOverloaded(EngineError):
    """The request waited as long as it may, or would. `retry_after_s`: when to send it again."""


class EngineClosed(EngineError):
    """The engine no longer takes requests."""


class StepFailed(EngineError):
    """The forward pass that this request was part of raised; the engine goes on."""


class NotFinite(EngineError):
    """The logits of this request are not numbers: its adapter's weights overflow."""

    @classmethod
    def under(cls, adapter: object) -> "NotFinite":
        """The error of a request under this adapter, None for the base model alone."""
        source = "the base model" if adapter is None else f"adapter {adapter}"
        return cls(f"the logits of {source} are not finite: it overflows")


class DeviceLost(EngineError):
    """The device can no longer be used by this process: no later step would work either."""


class ShapeError(EngineError):
    """Tensors handed to an operator do not fit together."""


class ModelError(EngineError):
    """The base model's folder cannot be loaded."""


class AdapterError(EngineError):
    """Something is wrong with one adapter."""


class AdapterRejected(AdapterError):
    """Not an acceptable adapter. `field` names the file, tensor or config key at fault."""


class AdapterTooLarge(AdapterError):
    """A rank or a byte size above the configured limit."""


class AdapterNotReady(AdapterError):
    """The adapter is still on its way. `retry_after_s`: when it should be there."""


class AdapterLoadFailed(AdapterError):
    """An accepted adapter could not be brought to the GPU.

    `own_disk`: where it is true, the machine's disk is full or broken and its memory no way round
    that; others may load it.
    """


class AdapterDamaged(AdapterError):
    """The adapter's weights in memory are no longer those of its digest; they are loaded anew.

    `retry_after_s`: when they should be there again.
    """
