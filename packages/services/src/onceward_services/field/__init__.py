"""Activities, contacts and expenses of a mobile app that creates them offline."""
