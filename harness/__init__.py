"""The lab host: drives boards over SSH and judges what comes back."""
