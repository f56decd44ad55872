"""The checks of the claims, by group and subject: `<letter of the group>_<subject>.py`."""
