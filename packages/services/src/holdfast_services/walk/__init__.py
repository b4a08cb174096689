"""A walking game played offline: a skill tree, quests, steps, and energy that steps are worth."""
