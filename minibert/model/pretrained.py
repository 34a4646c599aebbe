"""What every BERT model shares: initialisation, loading, saving, and switches that reach into the encoder."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from minibert.checkpoint.files import WeightFiles
from minibert.checkpoint.loading import LoadingReport, load_weights, resolve_dtype
from minibert.checkpoint.saving import WEIGHT_PATTERNS, save_checkpoint
from minibert.config import BertConfig
from minibert.errors import MinibertError, first_line
from minibert.hub import Source, upload
from minibert.model.attention import MultiHeadAttention
from minibert.model.outputs import ModelOutput

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("minibert")

Output = TypeVar("Output", bound=ModelOutput)


class BertPreTrainedModel(nn.Module):
    """Base of all models. A subclass builds its modules and then calls `post_init`."""

    base_model_prefix = "bert"  # where a task model keeps its BertModel, as in transformers
    tied_weights: ClassVar[Mapping[str, str]] = {}
    architecture: ClassVar[str | None] = None  # what config.json calls it, if not by the class's name
    config: BertConfig
    engine: str | None = None  # what runs an optimized model, whose layers' weights are parameters no more

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.source: Source | None = None  # the checkpoint it was loaded from
        self.register_state_dict_post_hook(_make_saveable)  # type: ignore[no-untyped-call]

    def post_init(self) -> None:
        """Initialises the modules just built, but for those of a nested model, and ties the shared parameters."""
        nested = tuple(f"{name}." for name, child in self.named_children() if isinstance(child, BertPreTrainedModel))
        self.init_weights(only=[name for name, _ in self.named_parameters() if not name.startswith(nested)])
        self.tie_weights()

    def init_weights(self, only: Collection[str] | None = None) -> None:
        """Draws BERT's initial weights: normal with `initializer_range`, zero biases, zero padding row.

        With `only`, just the modules that have these parameters are drawn.
        """
        if self.device.type == "meta":
            return  # a checkpoint is going to fill it
        for name, module in self.named_modules():
            owned = {f"{name}.{parameter}".lstrip(".") for parameter, _ in module.named_parameters(recurse=False)}
            if owned - self.tied_names().keys() and (only is None or owned <= set(only)):
                init_module(module, self.config)

    def tie_weights(self) -> None:
        """Makes tied parameters one object, if the config ties them."""
        for alias, source in self.tied_names().items():
            owner, _, attribute = alias.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(source))

    def tied_names(self) -> Mapping[str, str]:
        """Which parameter names stand for which others, as the config says."""
        return self.tied_weights if self.config.tie_word_embeddings else {}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters, shared ones counted once."""
        tables = {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        counted = (p for p in self.parameters() if not (exclude_embeddings and id(p) in tables))
        return sum(p.numel() for p in counted if p.requires_grad or not only_trainable)

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings."""
        name = next(name for name, _ in self.named_modules() if name.endswith("embeddings.word_embeddings"))
        embeddings = self.get_submodule(name)
        assert isinstance(embeddings, nn.Embedding)
        return embeddings

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Chooses the attention function of every layer, "sdpa" or "eager"."""
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                module.set_attn_implementation(attn_implementation)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Trades time for memory: layers keep no activations in training and are run again in the backward pass.

        Args:
            activation_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; default `use_reentrant=False`.
            every_n_layers: 1 for every layer, 2 for every second one, ...
            offload: not implemented.
        """
        if offload:
            raise MinibertError("offload=True is not implemented; activations stay where they are")
        self._set_checkpointing(max(1, every_n_layers), activation_checkpointing_kwargs or {})

    def activation_checkpointing_disable(self) -> None:
        """Keeps activations again."""
        self._set_checkpointing(0, {})

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The name `transformers` used before v5 for `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """The name `transformers` used before v5 for `activation_checkpointing_disable`."""
        self.activation_checkpointing_disable()

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward pass."""
        return any(getattr(module, "checkpoint_every", 0) > 0 for module in self.modules())

    is_gradient_checkpointing = is_activation_checkpointing  # its name before transformers v5

    def _set_checkpointing(self, every: int, kwargs: dict[str, Any]) -> None:
        for module in self.modules():
            if hasattr(module, "checkpoint_every"):
                module.checkpoint_every = every  # type: ignore[assignment]
                module.checkpoint_kwargs = {"use_reentrant": False, **kwargs}  # type: ignore[assignment]

    def result(self, output: Output, return_dict: bool | None) -> Output | tuple[Any, ...]:
        """`output`, or the plain tuple if `return_dict`, else the config, asks for that."""
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    @overload
    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, output_loading_info: Literal[False] = False, **options: Any
    ) -> Self: ...
    @overload
    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, output_loading_info: Literal[True], **options: Any
    ) -> tuple[Self, LoadingReport]: ...
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype = "auto",
        attn_implementation: str = "sdpa",
        device: str | torch.device | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        **config_overrides: Any,
    ) -> Self | tuple[Self, LoadingReport]:
        """Loads a checkpoint, local or from the Hub: `config.json` and the weights, in any of their spellings.

        The weights are `model.safetensors`, its shards, or the older `pytorch_model.bin`, of which only tensors are
        read; safetensors come first.

        Args:
            name_or_path: a directory, or the name of a model on the Hugging Face Hub.
            dtype: "auto" (the config's dtype, else the file's; float32 for half precision on a CPU that has no
                arithmetic for it), or the dtype of all parameters.
            attn_implementation: "sdpa", "eager", or on a GPU in half precision "varlen".
            device: where to put the model; default CPU. On CPU, weights of the file's own dtype stay mapped from
                it and are read on first use; they are private to the process, so training leaves the file alone.
            ignore_mismatched_sizes: initialise a head of another size instead of refusing it.
            output_loading_info: return a pair of model and report instead of logging; the report is a mapping with
                `missing_keys` (initialised), `unexpected_keys` (other heads', left out), `mismatched_keys` and
                `renamed_keys`, and prints as a summary.
            revision, subfolder, token, cache_dir, local_files_only: as in `hub.Source`.
            config_overrides: config fields to change, such as `num_labels` or `id2label`.

        Returns:
            The model in eval mode. A head that is not in the file is initialised and reported in the log.

        Raises:
            ConfigError: the config cannot be used.
            MinibertError: there is no such device here.
            CheckpointError: a file cannot be had or read, or its tensors do not fit the model: everything that is
                missing, unexpected or of another shape is listed at once.
        """
        source = Source(os.fspath(name_or_path), revision, subfolder, token, cache_dir, local_files_only)
        target = _usable(device)
        with source.unchanged():
            config = BertConfig.from_pretrained(source, **config_overrides)
            files = WeightFiles(source)
        with files:
            with torch.device("meta"):
                model = cls(config)
            model.set_attn_implementation(attn_implementation)
            chosen = resolve_dtype(dtype, config.dtype, files, target)
            report, fresh = load_weights(
                model,
                files,
                tied=model.tied_names(),
                dtype=chosen,
                device=target,
                ignore_mismatched_sizes=ignore_mismatched_sizes,
            )
        model.config = config.replace(dtype=str(chosen).removeprefix("torch."))
        for module in model.modules():
            if isinstance(module, BertPreTrainedModel):
                module.config = model.config
        model.source = source.remembered()
        model.init_weights(only=fresh)
        model.tie_weights()
        model.eval()
        if output_loading_info:
            return model, report
        if fresh:
            new = ", ".join(fresh)
            logger.warning("%s: %s not taken from %s; train before use", cls.__name__, new, name_or_path)
        return model

    def save_pretrained(self, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
        """Writes `config.json` and the weights, for `from_pretrained` here and in `transformers`.

        A model that was loaded brings its tokeniser's files along, where there are none yet.

        Args:
            directory: made if there is none; other files in it are left alone.
            max_shard_size: weights beyond this size ("5GB", "200MB", or a number of bytes) are split into shards
                with an index.

        Raises:
            CheckpointError: the directory cannot be written to, or the disk is full. Whatever stops it, be it the
                end of the process, leaves the checkpoint that was there before whole, or else the new one. (While
                its files move to their places, which takes a moment, other programs can see some of both.)
        """
        self._refuse_if_optimized("saved")
        save_checkpoint(
            self,
            self.saved_config(),
            directory,
            tied=self.tied_names(),
            source=self.source,
            max_shard_size=max_shard_size,
        )

    def train(self, mode: bool = True) -> Self:
        """Training mode, or eval mode, as in `nn.Module`; an optimized model has the latter only."""
        if mode:
            self._refuse_if_optimized("trained")
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `half`, `cuda` ... call. The first parameter comes back itself if it stays where and as it is.
        if self.engine is not None and fn(first := next(self.parameters())) is not first:
            self._refuse_if_optimized("moved or converted")
        return cast("Self", super()._apply(fn, recurse))  # type: ignore[no-untyped-call]

    def _refuse_if_optimized(self, what: str) -> None:
        if self.engine is not None:
            raise MinibertError(f"an optimized model ({self.engine}) cannot be {what}; take the one it was made from")

    def saved_config(self) -> BertConfig:
        """The config as a checkpoint of this model has it: with the architecture's name and the parameters' dtype."""
        dtype = str(self.dtype).removeprefix("torch.")
        return self.config.replace(architectures=[self.architecture or type(self).__name__], dtype=dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Uploads what `save_pretrained` writes to a model on the Hugging Face Hub, in one commit.

        Weights of an earlier upload that the new ones supersede are deleted in that commit; other files stay.

        Args:
            repo_id: "owner/name", or "name" for the account of the token; made if there is none.
            private: whether a repository that is made is private; default as the account has it.
            token: default the one that `hf auth login` stored.
            revision: the branch to commit to, made if there is none; default the main branch.
            commit_message: default "Upload" and the model's class.
            create_pr: propose the commit as a pull request instead.
            max_shard_size: as in `save_pretrained`.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            CheckpointError: the Hub refuses, or cannot be reached.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size)
            return upload(
                Path(folder),
                repo_id,
                private=private,
                token=token,
                revision=revision,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                create_pr=create_pr,
                superseded=list(WEIGHT_PATTERNS),
            )


def _usable(device: str | torch.device | None) -> torch.device:
    try:
        target = torch.device("cpu" if device is None else device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:  # no such name; PyTorch built without it; no such number
        raise MinibertError(
            f"device: expected one that is here, such as cpu, got {device} ({first_line(error)})"
        ) from None
    return target


def init_module(module: nn.Module, config: BertConfig) -> None:
    """Initial values of one module's own parameters (as google-research/bert and transformers have them)."""
    with torch.no_grad():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.PReLU):
            nn.init.constant_(module.weight, 0.25)
        elif getattr(module, "draws_itself", False):
            module.reset_parameters()  # type: ignore[operator]
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            nn.init.zeros_(bias)


def warn_of_unmasked_padding(input_ids: Tensor, pad_token_id: int | None) -> None:
    """Warns of padding without a mask, which changes every real token's result (on CPU, where looking is free)."""
    if pad_token_id is not None and input_ids.device.type == "cpu" and pad_token_id in input_ids.flatten().tolist():
        warnings.warn(
            f"input_ids hold the padding id {pad_token_id} but there is no attention_mask: padding is read as text",
            stacklevel=4,
        )


def _make_saveable(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Copies what safetensors does not write: tensors that are not contiguous, and the second of two that are one.

    Trainer hands a state dict to it as it is, and would end with an error at its first checkpoint.
    """
    tied = module.tied_names() if isinstance(module, BertPreTrainedModel) else {}
    for name, tensor in state.items():
        if name.removeprefix(prefix) in tied:
            state[name] = tensor.clone(memory_format=torch.contiguous_format)
        elif not tensor.is_contiguous():
            state[name] = tensor.contiguous()
