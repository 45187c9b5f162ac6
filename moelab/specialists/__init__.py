"""The bank of specialists beside the pure policies: what is installed, and how it meets a model.

bank          install, list and remove specialists; what is on disk and in which order
attach        route a model's layers through policies, and give the model back bit for bit
native        the experts of a mixture-of-experts layer as specialists of its shared expert
calibrate     scores whose zero means "no better than the anchor"
availability  which specialists a cache can give in time
"""

from moelab.specialists.attach import Attachment, RoutedMlp, attach
from moelab.specialists.availability import CacheAvailability, available_by_token, available_now
from moelab.specialists.bank import GatedMlp, Specialist, SpecialistBank, state_digest
from moelab.specialists.calibrate import ScoreCalibration, by_score, fit_calibration
from moelab.specialists.native import NativeLayer, NativeTokens

__all__ = [
    "Attachment",
    "CacheAvailability",
    "GatedMlp",
    "NativeLayer",
    "NativeTokens",
    "RoutedMlp",
    "ScoreCalibration",
    "Specialist",
    "SpecialistBank",
    "attach",
    "available_by_token",
    "available_now",
    "by_score",
    "fit_calibration",
    "state_digest",
]
