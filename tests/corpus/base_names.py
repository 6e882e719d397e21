"""Names of the base model that configs give, and how register resolves them."""

from tests.corpus.bases import HUB_NAME, SERVED_NAME
from tests.corpus.draft import Draft
from tests.corpus.features import EQUAL, Axis, Build, Feature

_OWNER, _, _NAME = HUB_NAME.rpartition("/")
_OTHER = "says that it was trained on"
_NOWHERE = "names no base model"


def _base(name: str, called: str | None, says: str = EQUAL) -> Feature:
    return Feature(name, Axis.BASE_NAME, lambda draft: draft.name_base(called), says)


def _chosen(called: str | None) -> Build:
    """Give the base model's name to register, as an admin does.

    called: name in the adapter's config; None: it has none.
    """

    def build(draft: Draft) -> None:
        draft.name_base(called)
        draft.base_model = SERVED_NAME

    return build


BASE_NAME: tuple[Feature, ...] = (
    _base("the served name", SERVED_NAME),
    _base("a local folder", f"/root/models/{_NAME}"),
    _base("a local folder with a slash behind", f"../models/{_NAME}/"),
    _base("a folder of Windows", rf"D:\models\{_NAME}"),
    _base("in small letters", HUB_NAME.lower()),
    _base("Unsloth's copy", f"unsloth/{_NAME}"),
    _base("Unsloth's copy in 4 bits", f"unsloth/{_NAME}-unsloth-bnb-4bit"),
    _base("a copy in 4 bits", f"unsloth/{_NAME}-bnb-4bit"),
    _base("MLX's copy", f"mlx-community/{_NAME}-4bit"),
    _base(
        "a snapshot in the Hub's cache",
        f"/root/.cache/huggingface/hub/models--{_OWNER}--{_NAME}/snapshots/{'0e9e39f2' * 5}",
    ),
    # modelscope/modelscope 5df2930, modelscope/utils/file_utils.py.
    _base(
        "a folder in ModelScope's cache",
        f"/root/.cache/modelscope/hub/models/{_OWNER}/{_NAME.replace('.', '___')}",
    ),
    Feature("another's name, and --base-model", Axis.BASE_NAME, _chosen("acme/sft-7")),
    Feature("no name, and --base-model", Axis.BASE_NAME, _chosen(None)),
    _base("no name", None, _NOWHERE),
    _base("an empty name", "", _NOWHERE),
    _base("the folder above", "../", _OTHER),
    _base("another size", "acme/Tiny-3B-Instruct", _OTHER),
    _base("a copy in another format", f"acme/{_NAME}-GPTQ-Int4", _OTHER),
    _base(
        "a snapshot of another model", f"/hub/models--acme--Other-1B/snapshots/{'ab' * 20}", _OTHER
    ),
)
