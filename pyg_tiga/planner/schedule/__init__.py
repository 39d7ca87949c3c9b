"""Where schedules come from: today the shipped table of defaults."""
