"""Detectors, their losses and the LightningModule that trains them."""
