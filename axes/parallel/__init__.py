"""Sequences that are split over processes."""

from axes.parallel.model import segment, sequence, whole

__all__ = ["segment", "sequence", "whole"]
