"""All errors that the engine raises.

EngineError
├── SettingsError        settings that contradict each other or do not fit the machine
├── InvalidRequest       a request that can never run: too long, bad sampling values
├── EngineOverloaded     the request waited too long, or would: `retry_after_s` says when to retry
├── EngineClosed         submitted after close, or the engine died
├── StepFailed           the forward pass of this request's step raised
├── NotFinite            the logits of this request overflowed
├── DeviceLost           the device is unusable until a new process starts
├── ShapeError           tensors given to an operator do not fit together
├── ModelError           a base model's folder that cannot be loaded
└── AdapterError         an error of one adapter
    ├── AdapterRejected  not an acceptable adapter, with `field` and reason
    ├── AdapterTooLarge  a rank or a size above the configured limit
    ├── AdapterNotReady  still loading when the request would wait no longer
    ├── AdapterLoadFailed  an accepted adapter that could not be loaded to the GPU
    └── AdapterDamaged   weights that changed in memory while requests used them

All are picklable: they cross process borders unchanged.
"""

from typing import Any


class EngineError(Exception):
    """Base of the tree. Keyword arguments become attributes and survive pickling."""

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
    """Settings that contradict each other, the model or the available memory."""


class InvalidRequest(EngineError):
    """Request that can never run.

    param: name of the offending field.
    """


class EngineOverloaded(EngineError):
    """Request that waited as long as it may, or would have to.

    retry_after_s: seconds after which to send the request again.
    """


class EngineClosed(EngineError):
    """Engine that takes no more requests."""


class StepFailed(EngineError):
    """Failure of the forward pass that computed the request; the engine goes on."""


class NotFinite(EngineError):
    """Logits of a request that are not numbers: its adapter's weights overflow."""

    @classmethod
    def under(cls, adapter: object) -> "NotFinite":
        """Return the error of a request under this adapter; None for the base model alone."""
        source = "the base model" if adapter is None else f"adapter {adapter}"
        return cls(f"the logits of {source} are not finite: it overflows")


class DeviceLost(EngineError):
    """Loss of the device for this process: no later step would work either."""


class ShapeError(EngineError):
    """Tensors given to an operator that do not fit together."""


class ModelError(EngineError):
    """Base model's folder that cannot be loaded."""


class AdapterError(EngineError):
    """Error of one adapter."""


class AdapterRejected(AdapterError):
    """File or folder that is no acceptable adapter.

    field: name of the file, tensor or config key at fault.
    """


class AdapterTooLarge(AdapterError):
    """Rank or byte size above the configured limit."""


class AdapterNotReady(AdapterError):
    """Adapter that is still loading.

    retry_after_s: seconds after which the adapter should be there.
    """


class AdapterLoadFailed(AdapterError):
    """Accepted adapter that could not be loaded to the GPU.

    own_disk: whether this machine's disk is full or broken and its memory no way round that. Other
        machines may load the adapter.
    """


class AdapterDamaged(AdapterError):
    """Adapter whose weights in memory no longer match its digest; they are loaded again.

    retry_after_s: seconds after which the weights should be there again.
    """
