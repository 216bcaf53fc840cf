"""What a rank was doing: the flight recorder, the watchdog, and the verdict of all ranks' records."""
