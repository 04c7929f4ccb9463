"""Where torch.utils.checkpoint fails or goes wrong, each beside the same model under actmem. See docs/hazards.md."""
