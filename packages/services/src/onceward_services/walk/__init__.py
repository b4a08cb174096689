"""A walking game that is played offline: a skill tree, quests, and energy earned by steps."""
