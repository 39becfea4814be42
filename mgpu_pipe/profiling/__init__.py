"""Where the time of a step goes. What trains imports it only where ``trainer.profile`` asks for it."""
