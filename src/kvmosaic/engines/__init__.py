"""Engines that serve prompts with reused chunks."""
