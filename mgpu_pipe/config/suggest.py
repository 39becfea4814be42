"""Suggestions for a word that is not valid here: the nearest valid one, or the name here of another program's word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from mgpu_pipe.config.objective import descriptions
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.system.local_files import exists, is_file, is_folder

CUTOFF = 0.6
LISTED = 30
LONGEST_WORD = 120
"""A longer word is no typo, and comparing takes quadratic time."""


def nearest(word: str, options: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The option nearest to ``word``, or None if none is near."""
    if len(word) > LONGEST_WORD:
        return None
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=cutoff)
    return close[0] if close else None


def choose_from(word: str, options: Iterable[str]) -> str:
    """A fix for a wrong choice: ``did you mean ddp? (one of ddp, single)``; lists at most ``LISTED`` options."""
    names = sorted(set(options))
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    close = nearest(word, names)
    return f"did you mean {close}? (one of {listed})" if close else f"use one of {listed}"


def nearest_key(path: str, keys: Iterable[str]) -> str | None:
    """The valid dotted key nearest to ``path``.

    A key without a section comes first (``seed`` for ``data.seed``), then one of the same section, then any key with
    the same last word (``optimizer.lr`` for ``lr``), then the nearest whole path.
    """
    every = set(keys)
    sections = {key.rpartition(".")[0] for key in every}
    known = sorted(every - sections) if "." in path else sorted(every)
    section, _, last = path.rpartition(".")
    if last in every - sections:
        return last
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    close = nearest(last, siblings)
    if close:
        return siblings[close]
    same_word = [key for key in known if key.rpartition(".")[2] == last]
    if same_word:
        return nearest(path, same_word, cutoff=0.0)
    nearest_path = nearest(path, known, cutoff=0.8)
    if nearest_path:
        return nearest_path
    words = {key.rpartition(".")[2]: key for key in known}
    close = nearest(last, words, cutoff=0.75)
    return words[close] if close else None


BATCH = "use data.global_batch_size (samples an optimizer step, all processes together)"
MICRO = "use data.micro_batch_size (it fits memory; data.global_batch_size fixes the mathematics)"
PRECISION = "choose it by precision=fp32, bf16, fp16 or bf16_true"

MEANT: tuple[tuple[str, str], ...] = (
    ("check what would run with mgpu-pipe check", "dry_run dryrun"),
    ("optimizer.lr", "learning_rate base_lr max_lr peak_lr"),
    ("use scheduler.min_lr_ratio (the final rate as a share of optimizer.lr)", "min_lr min_learning_rate"),
    ("optimizer.weight_decay", "wd decay"),
    ("use optimizer.options.betas=[0.9,0.95]", "betas beta1 beta2 adam_beta1 adam_beta2"),
    ("use optimizer.options.eps=1e-8", "eps adam_epsilon adam_eps"),
    ("use optimizer=sgd optimizer.options.momentum=0.9", "momentum"),
    ("choose it by optimizer=<option> (mgpu-pipe ls optimizer)", "optim optimizer_name optimizer_type optim_type"),
    (
        "choose it by scheduler=<option> (mgpu-pipe ls scheduler)",
        "lr_scheduler lr_scheduler_type lr_schedule schedule lr_decay_style",
    ),
    ("scheduler.warmup_steps", "warmup warmup_iters num_warmup_steps lr_warmup_steps"),
    ("scheduler.warmup_ratio", "warmup_ratio warmup_fraction"),
    (BATCH, "batch_size bs train_batch_size total_batch_size effective_batch_size batch global_batch"),
    (
        MICRO,
        "per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size micro_batch mbs "
        "train_micro_batch_size_per_gpu per_device_eval_batch_size eval_batch_size local_batch_size",
    ),
    (
        "leave it out: the micro-batches follow from data.global_batch_size and data.micro_batch_size",
        "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation accumulation_steps",
    ),
    ("use trainer.max_epochs with trainer.max_steps=null", "epochs num_epochs n_epochs num_train_epochs max_epoch"),
    ("trainer.max_steps", "steps num_steps max_iters train_iters iterations num_train_steps train_steps"),
    ("trainer.devices", "gpus num_gpus n_gpus ngpus nproc nproc_per_node num_processes world_size num_devices"),
    ("trainer.num_nodes", "nodes nnodes n_nodes"),
    ("trainer.accelerator", "device device_type"),
    (
        "use model=hf model.path=<folder>",
        "model_name_or_path pretrained_model_name_or_path model_path model_name pretrained base_model",
    ),
    ("data.tokenizer", "tokenizer_name tokenizer_path tokenizer_name_or_path"),
    (
        "use run.dir for this run's folder, or run.root for the folder of all runs",
        "output_dir out_dir save_dir log_dir logging_dir default_root_dir work_dir",
    ),
    ("run.name", "run_name exp_name experiment_name"),
    ("checkpoint.every_n_steps", "save_steps save_interval save_every every_n_train_steps checkpoint_every every"),
    ("checkpoint.keep_last", "save_total_limit save_top_k"),
    ("checkpoint.resume", "resume_from_checkpoint resume_from ckpt_path resume_path"),
    ("trainer.val_every_n_steps", "eval_steps eval_interval eval_every val_interval val_check_interval eval_freq"),
    ("trainer.log_every_n_steps", "logging_steps log_interval log_every log_freq"),
    ("trainer.gradient_clip_val", "max_grad_norm grad_clip clip_grad gradient_clipping clip_grad_norm clip_norm"),
    (
        "data.seq_len",
        "max_seq_length max_seq_len block_size context_length sequence_length sequence_len max_length seq_length "
        "cutoff_len",
    ),
    ("seed", "random_seed manual_seed rng_seed seed_everything"),
    ("choose it by peft=lora; its rank is peft.r", "lora_r lora_rank lora adapter use_lora"),
    ("peft.alpha", "lora_alpha"),
    ("peft.dropout", "lora_dropout"),
    ("peft.targets", "lora_target_modules target_modules"),
    ("choose it by peft=qlora", "qlora load_in_4bit"),
    ("use model.attn_implementation=flash_attention_2", "flash_attention flash_attn use_flash_attention"),
    (PRECISION, "mixed_precision amp dtype torch_dtype autocast half"),
    ("choose it by precision=fp16", "fp16"),
    ("choose it by precision=bf16", "bf16 bfloat16"),
    ("choose it by precision=fp32", "fp32 float32"),
    ("precision.tf32", "allow_tf32"),
    ("precision.fp8_recipe", "float8_recipe float8_recipe_name recipe_name"),
    ("precision.reduce", "reduce_dtype mixed_precision_reduce grad_reduce_in_bf16 communication_data_type"),
    (
        "use strategy.activation_checkpointing=full",
        "gradient_checkpointing activation_checkpoint checkpoint_activations recompute",
    ),
    ("choose it by strategy=fsdp", "use_fsdp fully_shard"),
    ("choose it by strategy=ddp", "use_ddp data_parallel"),
    ("choose it by strategy=zero1, zero2 or zero3", "zero_stage zero deepspeed use_deepspeed"),
    ("strategy.tp", "tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel tensor_parallel_degree"),
    (
        "strategy.pp",
        "pp_size pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel pipeline_parallel_degree",
    ),
    ("strategy.cp", "cp_size context_parallel_size context_parallel context_parallel_degree"),
    ("strategy.ep", "ep_size expert_parallel_size expert_model_parallel_size expert_parallel expert_parallel_degree"),
    ("strategy.dp_shard", "data_parallel_shard_degree fsdp_size"),
    ("strategy.dp_replicate", "data_parallel_replicate_degree"),
    ("data.packing", "sample_packing pad_to_sequence_len packed_sequence_size"),
    ("choose it by peft=lora or peft=qlora", "finetuning_type peft_type"),
    ("choose it by objective=<option> (mgpu-pipe ls objective), ZeRO's by strategy=zero1, zero2 or zero3", "stage"),
    (
        "use data=chat_jsonl, whose loss is on the answers, or data=jsonl, whose loss is on all",
        "train_on_inputs train_on_prompt completion_only_loss assistant_only_loss train_on_responses_only",
    ),
    (
        "use data=text_files 'data.paths=[\"corpus/*.txt\"]' (or jsonl, parquet; mgpu-pipe ls data)",
        "dataset dataset_name dataset_path data_path data_dir train_file train_files train_data train_path train_paths "
        "file files folder",
    ),
    ("data.validation_paths", "validation_file eval_file val_data validation_file_path"),
    ("data.num_workers", "dataloader_num_workers workers"),
    ("model.compile", "torch_compile compile"),
    ("use model.kernels=liger", "use_liger_kernel use_liger liger liger_kernel"),
    (
        "use model.config.num_hidden_layers (or what the model's own configuration calls it)",
        "num_layers n_layers n_layer num_hidden_layers layers",
    ),
    ("use model.config.hidden_size (or what the model's own configuration calls it)", "hidden_size d_model n_embd"),
    ("use model.config.vocab_size", "vocab_size vocabulary_size"),
    ("choose it by logger=tensorboard, wandb, mlflow or none", "report_to log_with use_wandb wandb tensorboard"),
    (
        "use callbacks=early_stopping callbacks.early_stopping.patience=<evaluations>",
        "patience early_stopping_patience",
    ),
)
"""Key or advice, and other programs' names for it."""

VERBS = {
    **dict.fromkeys(("resume", "continue"), "no such verb; add checkpoint.resume=auto to the words of the run"),
    **dict.fromkeys(("fit", "finetune", "sft", "pretrain", "run", "launch"), "no such verb; use train"),
    **dict.fromkeys(("test", "evaluate", "validate", "benchmark"), "no such verb; use eval"),
    **dict.fromkeys(("predict", "inference", "infer", "sample"), "no such verb; use generate (or eval, chat)"),
    **dict.fromkeys(("embed", "vectors", "embeddings"), "no such verb; use encode"),
    **dict.fromkeys(("deploy", "server", "host", "api"), "no such verb; use serve"),
    **dict.fromkeys(("convert", "merge", "save"), "no such verb; use export"),
    **dict.fromkeys(("preprocess", "tokenize", "inspect"), "no such verb; use data"),
    **dict.fromkeys(("list", "options"), "no such verb; use ls (of configurations) or runs"),
    **dict.fromkeys(("lint", "plan"), "no such verb; use check"),
}
"""Other programs' verbs, and the advice for each."""

GROUPS = ("strategy", "precision", "optimizer", "scheduler", "logger", "callbacks")
"""Groups that other programs write as keys of a section, such as ``trainer.strategy``."""

VALUES: dict[str, dict[str, str]] = {
    "strategy": {
        "deepspeed": "strategy=zero1, zero2 or zero3",
        "fully_shard": "strategy=fsdp",
        "deepspeed_stage_1": "strategy=zero1",
        "deepspeed_stage_2": "strategy=zero2",
        "deepspeed_stage_3": "strategy=zero3",
        "deepspeed_stage_3_offload": "strategy=zero3_cpu",
    },
    "precision": {
        "bf16-mixed": "precision=bf16",
        "bf16-true": "precision=bf16_true",
        "16-mixed": "precision=fp16",
        "32-true": "precision=fp32",
        "32": "precision=fp32",
        "16": "precision=fp16",
        "float32": "precision=fp32",
        "float16": "precision=fp16",
        "half": "precision=fp16",
        "bfloat16": "precision=bf16",
    },
    "optimizer": {
        "adam": "optimizer=adamw",
        "torch.optim.adamw": "optimizer=adamw",
        "torch.optim.sgd": "optimizer=sgd",
    },
    "scheduler": {
        "none": "scheduler=constant",
        "linear_with_warmup": "scheduler=linear scheduler.warmup_steps=<steps>",
        "cosine_with_warmup": "scheduler=cosine scheduler.warmup_steps=<steps>",
        "constant_with_warmup": "scheduler=constant scheduler.warmup_steps=<steps>",
    },
    "trainer.devices": {
        "-1": "trainer.devices=auto",
        "all": "trainer.devices=auto",
        "cuda": "trainer.accelerator=cuda",
        "gpu": "trainer.accelerator=cuda",
        "cpu": "trainer.accelerator=cpu",
    },
    "checkpoint.resume": {
        **dict.fromkeys(("true", "yes", "last", "latest"), "checkpoint.resume=auto"),
        **dict.fromkeys(("false", "no"), "checkpoint.resume=none"),
    },
}
"""Other programs' values by group or key, and the value here."""

FORMS = {"trainer.max_time": "write it as DD:HH:MM:SS, e.g. 00:12:00:00"}
"""Advice by key, for a number where a text is needed."""

MODEL_FIELDS = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer", "layers", "depth"), "num_hidden_layers"),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "heads"), "num_attention_heads"),
    **dict.fromkeys(("d_model", "n_embd", "width", "dim", "embed_dim"), "hidden_size"),
    **dict.fromkeys(("d_ff", "ffn_dim", "mlp_dim", "ffn_hidden_size"), "intermediate_size"),
    **dict.fromkeys(("n_positions", "context_length", "max_seq_len", "block_size"), "max_position_embeddings"),
    **dict.fromkeys(("vocabulary_size", "vocab"), "vocab_size"),
}
"""Other families' names of model fields, and transformers' standard name."""

YAML = (".yaml", ".yml")
SOURCE_BY_SUFFIX = {".jsonl": "jsonl", ".parquet": "parquet", ".txt": "text_files"}
"""Data source by file suffix."""

SECTION_NAMES = dict.fromkeys(("lora", "qlora", "dora", "adapter"), "peft")
"""Other programs' names of sections."""

FIXES = {word: meant if " " in meant else f"did you mean {meant}?" for meant, words in MEANT for word in words.split()}


def known_elsewhere(key: str, value: object = "") -> str | None:
    """Fix for a key of another program with ``value``, e.g. a number or kind of devices; else None."""
    section, _, word = key.rpartition(".")
    if word == "device" and str(value).isdigit():
        return "did you mean trainer.devices? (trainer.accelerator is their kind)"
    if section in GROUPS and word in ("name", "type"):
        return f"choose it by {section}=<option> (mgpu-pipe ls {section})"
    if section and word in GROUPS:
        return f"choose it by {word}=<option> (mgpu-pipe ls {word})"
    return FIXES.get(word.lower().replace("-", "_"))


def value_elsewhere(key: str, value: str) -> str | None:
    """Fix for a value of another program for ``key``, or for a path; None for any other value."""
    here = VALUES.get(key, {}).get(value.lower())
    if key == "objective" and (names := [known.name for known in descriptions() if value.lower() in known.other_names]):
        here = f"objective={' or '.join(names)}"
    if here is None and key == "model" and ("/" in value or is_folder(Path(value))):
        here = f"model=hf model.path={value}"
    if here is None and key == "data" and Path(value).suffix in SOURCE_BY_SUFFIX:
        here = f"data={SOURCE_BY_SUFFIX[Path(value).suffix]} 'data.paths=[\"{value}\"]' (mgpu-pipe ls data)"
    if here is None and Path(value).suffix in YAML and Path(value).name != value:
        here = f"{key}={Path(value).stem}, with the file as ./conf/{key}/{Path(value).name}"
    return None if here is None else f"use {here}"


def path_advice(word: str) -> str | None:
    """Advice for a path typed as an override or a verb; None for any other word."""
    path = Path(word)
    if path.suffix in YAML:
        group = path.parent.name if path.parent.parent.name == "conf" else "experiment"
        place = "" if group == path.parent.name else f" a file of overrides lies in ./conf/{group}, and"
        return f"a configuration is chosen by its name:{place} the word is {group}={path.stem}"
    if is_file(RunPaths(path).config):
        again = f"--config-path {word} run.dir={word} checkpoint.resume=auto"
        return f"is a run; resume it by mgpu-pipe {again}, or use a command, e.g. mgpu-pipe eval {word}"
    if exists(path):
        return f"is a path; give it to a key, e.g. model=hf model.path={word} or 'data.paths=[\"{word}\"]'"
    return None
