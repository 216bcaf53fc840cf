"""The flight recorder, the watchdog, and the verdict: which rank or call a hanging or failed job waits for."""
