"""Scales, zeros and offsets in all kernels: how they come from memory, the numbers they become, and what these scale.

    conversion      numbers in memory, and codes of a second level, as f32: for every kernel

    of few tokens (`passes.kernels.streaming`), by step:
    staged_scales   how they come to shared memory, beside the codes of a step
    group_scales    the numbers of a group, as a lane needs them
    step_scales     the numbers of all groups of a step, computed once for all lanes of a warp
    block_scales    which of these a block has
    sum_scaling     sums of a group, times its scale
    weight_scaling  weights, scaled before they are multiplied

    of any number of tokens (`passes.kernels.persistent`), by round:
    round_tensors   how many numbers of each tensor a round has, and how they come
    round_scales    how they come, and the numbers of a group
    panel_scales    the numbers of all groups of a panel, computed once for all lanes of a warp

Where a plan applies scales, and in which type, is `streaming.scaling` and `persistent.scaling`.
"""
