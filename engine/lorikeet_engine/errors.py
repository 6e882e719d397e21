"""All errors that the engine raises.

EngineError
├── SettingsError        settings that contradict each other or do not fit the machine
├── InvalidRequest       a request that can never run: too long, bad sampling values
├── EngineOverloaded     the request waited too long, or would: `retry_after_s` says when to retry
├── EngineClosed         submitted after close, or the engine died
├── StepFailed           the forward pass of this request's step raised
├── NotFinite            the logits of this request overflowed
│   └── AdapterOverflows because of its adapter's weights
├── DeviceLost           the device is unusable until a new process starts
├── ShapeError           tensors given to an operator do not fit together
├── ModelError           a base model's folder that cannot be loaded
└── AdapterError         an error of one adapter
    ├── AdapterRejected  not an acceptable adapter, with `field` and reason
    ├── AdapterTooLarge  a rank or a size above the configured limit
    ├── AdapterNotComposable  an adapter that cannot be added to others
    ├── AdapterNotReady  still loading when the request could wait no longer
    ├── AdapterLoadFailed  an accepted adapter that could not be loaded to the GPU
    │   └── AdapterMissing  because the store does not have its blob
    └── AdapterDamaged   weights that changed in memory while requests used them

All are picklable, with their attributes, so they can be sent to other processes.
"""

from enum import StrEnum
from typing import Any


class EngineError(Exception):
    """Base class of all errors that the engine raises.

    Keyword arguments become attributes, and survive pickling.
    """

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
    """Request that cannot begin in time: it waited for max_queue_s, or is expected to wait longer.

    Also a request whose tenant has too many grammars in use.

    retry_after_s: seconds after which to send the request again.
    """


class EngineClosed(EngineError):
    """Engine that accepts no more requests."""


class StepFailed(EngineError):
    """Failure of the forward pass that computed a request; the engine continues to serve others."""


class NotFinite(EngineError):
    """Logits of a request that are not numbers: the base model or its adapter overflows."""

    @classmethod
    def under(cls, adapter: object) -> "NotFinite":
        """Return the error for a request whose logits are not finite.

        adapter: adapter that the request used; None: the base model alone.
        """
        if adapter is None:
            return cls("the logits of the base model are not finite: it overflows")
        return AdapterOverflows(
            f"the logits of adapter {adapter} are not finite: its weights are too large for this "
            "prompt: train it at a lower learning rate or scaling, and register it again"
        )


class AdapterOverflows(NotFinite):
    """Logits of a request that are not numbers because of its adapter's weights."""


class DeviceLost(EngineError):
    """Loss of the device for this process: no later step would succeed either."""


class ShapeError(EngineError):
    """Tensors given to an operator that do not fit together."""


class ModelError(EngineError):
    """Base model's folder that cannot be loaded."""


class AdapterError(EngineError):
    """Base class of errors that concern one adapter."""


class AdapterRejected(AdapterError):
    """File or folder that is not an acceptable adapter.

    field: name of the file, tensor or config key at fault.
    """


class AdapterTooLarge(AdapterError):
    """Adapter above a limit: its rank, bytes, labels or trained tokens, or the engine's memory for
    adapters.
    """


class AdapterNotComposable(AdapterError):
    """Adapter that cannot be added to others, since it is more than matrices A and B of linears.

    adapter: the adapter.
    param: field of the request that names it.
    """


class AdapterNotReady(AdapterError):
    """Adapter that is still being loaded.

    retry_after_s: seconds after which the adapter is expected to be loaded.
    """


class LoadFault(StrEnum):
    """Part that is at fault when an adapter cannot be loaded.

    ADAPTER: the adapter's own file, which the store refuses or which is damaged. Other adapters can
        be loaded.
    DISK: this machine's disk, which is full or broken and could not be bypassed through memory.
        Other machines may be able to load the adapter.
    STORE: perhaps the store, which sent the adapter's file too slowly or not at all, and sent no
        other file meanwhile.
    """

    ADAPTER = "adapter"
    DISK = "disk"
    STORE = "store"


class AdapterLoadFailed(AdapterError):
    """Adapter that was accepted, but could not be loaded to the GPU.

    fault: part that is at fault, a LoadFault. An error without this attribute means ADAPTER.
    retry_after_s: seconds after which to send the request again.
    """


class AdapterMissing(AdapterLoadFailed):
    """Adapter whose file the store lacks: it was lost, or its version was pushed for a limited time
    that is over.
    """


class AdapterDamaged(AdapterError):
    """Adapter whose weights in memory were found damaged; they are loaded again.

    retry_after_s: seconds after which the weights are expected to be loaded again.
    """
