"""A key-value cache whose rows come and go while the others are decoded."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class RowLayer(DynamicLayer):
    """One layer's keys and values, rows x heads x columns x D, all rows right-aligned at the same newest column.

    A column is written into spare room, so a decode step copies nothing that is there already. `window` bounds the
    columns that are seen, the newest one included; None: all.
    """

    def __init__(self, prefilled: DynamicLayer, prompt_of_row_R: Tensor) -> None:
        super().__init__()
        self.window: int | None = getattr(prefilled, "sliding_window", None)
        self.is_sliding = self.window is not None
        self.length = prefilled.get_seq_length()
        self.dtype, self.device = prefilled.keys.dtype, prefilled.keys.device
        self.is_initialized = True
        self._hold(prefilled.keys[prompt_of_row_R], prefilled.values[prompt_of_row_R])

    def _held(self, length: int) -> int:
        """Columns kept of `length`: a window needs one less than it sees, which is the one to come."""
        return length if self.window is None else min(length, self.window - 1)

    def _hold(self, keys: Tensor, values: Tensor, left: int = 0) -> None:
        """Copy what is held into a new buffer, `left` empty columns before it and spare room behind."""
        rows, heads, columns, _ = keys.shape
        columns += left
        room = columns + max(64, columns // 2)
        # Zeros: what the attention mask hides is still multiplied by 0, and NaN in fresh memory would come through.
        self._keys = keys.new_zeros(rows, heads, room, keys.shape[-1])
        self._values = values.new_zeros(rows, heads, room, values.shape[-1])
        self._keys[:, :, left:columns], self._values[:, :, left:columns] = keys, values
        self._first, self._end = 0, columns
        self._view()

    def _view(self) -> None:
        self.keys = self._keys[:, :, self._first : self._end]
        self.values = self._values[:, :, self._first : self._end]

    def update(  # the other arguments are of kinds of layers that this is not
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the newest column of every row; returns all that this step may attend to."""
        new = key_states.shape[-2]
        if self._end + new > self._keys.shape[-2]:
            self._hold(self.keys, self.values)
        self._keys[:, :, self._end : self._end + new] = key_states
        self._values[:, :, self._end : self._end + new] = value_states
        self._end += new
        self.length += new
        self._view()
        seen = self.keys, self.values
        self._first = self._end - min(self._end - self._first, self._held(self.length))
        self._view()
        return seen

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a step of `query_length` attends to, and how many older ones are out of sight."""
        held = self._held(self.length)
        return held + query_length, self.length - held

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows."""
        self._hold(self.keys[beam_idx], self.values[beam_idx])

    def trim(self, columns: int) -> None:
        """Forget the oldest `columns`, in which no row has anything."""
        held = self._held(self.length)
        self.length -= columns
        self._first += held - self._held(self.length)
        self._view()

    def replace(self, slots_N: Tensor, prefilled: DynamicLayer, prompt_of_row_N: Tensor) -> None:
        """Put new prompts into the places of rows that have ended, right-aligned."""
        longer = prefilled.get_seq_length() - self.length
        if longer > 0:
            missing = self._held(self.length + longer) - self._held(self.length)
            self._hold(self.keys, self.values, left=missing)
            self.length += longer
        columns = min(prefilled.keys.shape[-2], self._end - self._first)
        place = slice(self._end - columns, self._end)
        self._keys[slots_N, :, place] = prefilled.keys[prompt_of_row_N][:, :, -columns:]
        self._values[slots_N, :, place] = prefilled.values[prompt_of_row_N][:, :, -columns:]


class RowCache(Cache):
    """The layers' rows; made from prompts that have been computed once each."""

    def __init__(self, prefilled: DynamicCache, prompt_of_row_R: Tensor) -> None:
        super().__init__(layers=[RowLayer(layer, prompt_of_row_R) for layer in prefilled.layers])

    @staticmethod
    def holds(prefilled: DynamicCache) -> bool:
        """Whether every layer is plain or sliding attention; states of other layers cannot be aligned by columns."""
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in prefilled.layers)

    @property
    def length(self) -> int:
        return self.layers[0].length

    def trim(self, columns: int) -> None:
        for layer in self.layers:
            layer.trim(columns)

    def replace(self, slots_N: Tensor, prefilled: DynamicCache, prompt_of_row_N: Tensor) -> None:
        for layer, new in zip(self.layers, prefilled.layers, strict=True):
            layer.replace(slots_N, new, prompt_of_row_N)
