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
