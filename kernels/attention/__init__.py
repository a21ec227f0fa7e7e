"""Where later versions of FlyDSL have their flash-attention function: `attention.flash_attn_interface`."""
