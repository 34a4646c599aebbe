"""Pictures of what a model does: its attention as a page or figures, and entities in their text."""

from minibert.visualize.attention import Attention, read_attention
from minibert.visualize.entities import Html, entities_html, entities_page
from minibert.visualize.figures import attention_figure, head_figure, overview_figure, rollout_figure

__all__ = [
    "Attention",
    "Html",
    "attention_figure",
    "entities_html",
    "entities_page",
    "head_figure",
    "overview_figure",
    "read_attention",
    "rollout_figure",
]
