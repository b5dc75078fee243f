"""Names of llm-compressor 0.14.0.1 that scripts use, as data."""

from __future__ import annotations

ONESHOT = (
    *("model", "config_name", "tokenizer", "processor", "precision", "tie_word_embeddings"),
    *("trust_remote_code_model", "save_compressed", "model_revision"),
    *("recipe", "recipe_args", "clear_sparse_session", "stage"),
    *("dataset", "dataset_config_name", "dataset_path", "dvc_data_repository", "raw_kwargs"),
    *("splits", "batch_size", "data_collator", "num_calibration_samples"),
    *("shuffle_calibration_samples", "max_seq_length", "pad_to_max_length", "text_column"),
    *("remove_columns", "preprocessing_func", "concatenate_data", "streaming", "overwrite_cache"),
    *("preprocessing_num_workers", "dataloader_num_workers", "min_tokens_per_module"),
    *("moe_calibrate_all_experts", "pipeline", "tracing_ignore", "sequential_targets"),
    *("sequential_targets_per_subgraph", "sequential_offload_device", "sequential_prefetch"),
    *("quantization_aware_calibration", "propagate_error", "use_loss_mask"),
    *("output_dir", "log_dir"),
)
"""Arguments of `oneshot`: those of its signature, and fields of its argument classes."""

IMPORTS = {
    "": "oneshot Oneshot model_free_ptq active_session create_session reset_session callbacks "
    "logger configure_logger LoggerConfig",
    "args": "DatasetArguments ModelArguments RecipeArguments parse_args",
    "core": "active_session create_session reset_session callbacks LifecycleCallbacks State Event "
    "EventType CompressionSession",
    "core.events": "Event EventType",
    "core.session": "CompressionSession",
    "core.session_functions": "active_session create_session reset_session callbacks",
    "core.state": "State",
    "datasets": "get_rank_partition get_processed_dataset get_calibration_dataloader "
    "format_calibration_data",
    "datasets.utils": "get_rank_partition get_calibration_dataloader",
    "entrypoints": "oneshot Oneshot model_free_ptq",
    "entrypoints.model_free": "model_free_ptq",
    "entrypoints.oneshot": "oneshot Oneshot",
    "logger": "logger configure_logger LoggerConfig",
    "modeling.deepseekv32.model": "DeepseekV32ForCausalLM",
    "modeling.moe.context": "moe_calibration_context",
    "modeling.moe.linearize": "load_quantizable_moe linearize_moe repack_moe",
    "modifiers": "Modifier",
    "modifiers.autoround": "AutoRoundModifier fix_batch_if_needed",
    "modifiers.autoround.utils": "get_local_gpu_group_size init_gpu_group_dist",
    "modifiers.awq": "AWQModifier",
    "modifiers.gptq": "GPTQModifier",
    "modifiers.logarithmic_equalization": "LogarithmicEqualizationModifier",
    "modifiers.modifier": "Modifier",
    "modifiers.pruning": "ConstantPruningModifier MagnitudePruningModifier SparseGPTModifier "
    "WandaPruningModifier REAPPruningModifier",
    "modifiers.pruning.sparsegpt": "SparseGPTModifier",
    "modifiers.pruning.wanda": "WandaPruningModifier",
    "modifiers.quantization": "GPTQModifier QuantizationModifier",
    "modifiers.quantization.calibration": "initialize_observer",
    "modifiers.quantization.gptq": "GPTQModifier",
    "modifiers.smoothquant": "SmoothQuantModifier",
    "modifiers.transform": "AWQModifier QuIPModifier SmoothQuantModifier SpinQuantModifier",
    "modifiers.transform.awq": "AWQModifier",
    "modifiers.transform.quip": "QuIPModifier",
    "modifiers.transform.smoothquant": "SmoothQuantModifier",
    "modifiers.transform.spinquant": "SpinQuantModifier",
    "modifiers.transform.spinquant.mappings": "SpinQuantMapping",
    "modifiers.transform.spinquant.norm_mappings": "NormMapping",
    "observers": "Observer",
    "observers.base": "Observer",
    "observers.helpers": "flatten_for_calibration",
    "recipe": "Recipe",
    "recipe.recipe": "Recipe",
    "transformers": "TextGenerationDataset",
    "transformers.data": "TextGenerationDataset",
    "transformers.tracing": "trace",
    "utils": "load_context dispatch_for_generation skip_weights_download get_main_device "
    "untie_word_embeddings",
    "utils.dev": "load_context dispatch_for_generation skip_weights_download get_main_device "
    "skip_weights_initialize",
    "utils.transformers": "untie_word_embeddings",
}
"""Module below the root -> public names in it that scripts import."""

NAMES = [(module, name) for module, names in IMPORTS.items() for name in names.split()]
