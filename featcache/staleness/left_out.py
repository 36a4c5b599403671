"""Names of attributes that no computing in evaluation mode reads: tables, by what they are for."""

from __future__ import annotations

import re

# read in training only
_TRAINING = re.compile(
    r"\w*dropout\w*$|\w*layer_?drop\w*$|\w*drop_(prob|rate|path)$|\w*freeze\w*$|requires_grad$"
    r"|inplace$|_?gradient_checkpointing\w*$|apply_spec_augment$|mask_(time|feature)_\w+$"
    r"|\w*initializer_(range|factor)$|init_(std|method|scale)$|\w*_loss_\w+$|ctc_\w+$"
    r"|update_until_epoch$|training$"
)
# by classes of these names, in training only
_TRAINING_OF = (
    (re.compile(r"\w*(Drop(out|Path)|StochasticDepth)\w*$"), re.compile(r"p$|drop\w*$")),
    (re.compile(r"\w*BatchNorm\w*$"), re.compile(r"momentum$|num_batches_tracked$")),
)
# of libraries' objects: versions, places, messages, threads
_MACHINERY = re.compile(
    r"(\w*_)?version$|n_jobs$|_?n_threads$|num_threads$|verbose$|deprecation_warnings$"
    r"|warnings_issued$|_?name_or_path$|_commit_hash$|_in_target_context_manager$"
    r"|special_tokens_map_file$|_attn_implementation\w*$|_experts_implementation\w*$"
    r"|_keys_to_ignore\w*$|_\w+_plan$|_no_split_modules$|_keep_in_fp32\w*$|_post_init_done$"
)
# of estimators: how they were fitted
_FITTING = re.compile(
    r"labels_$|inertia_$|n_iter_$|n_steps_$|n_samples_seen_$|_?tol$|max_iter$|_?n_init$"
    r"|random_state$|_ewa_inertia\w*$|_no_improvement$|_n_since_last_reassign$|_counts$"
)


def is_for_training(cls: type, name: str) -> bool:
    """Tell whether only training reads an attribute of a module."""
    mine = any(of.match(cls.__name__) and attribute.match(name) for of, attribute in _TRAINING_OF)
    return mine or _TRAINING.match(name) is not None


def is_left_out(name: str) -> bool:
    """Tell whether an attribute of a library's object is no part of what it computes."""
    tables = (_TRAINING, _MACHINERY, _FITTING)
    return any(table.match(name) is not None for table in tables)
