"""Activities, contacts and expenses: what an app in the field creates offline and sends later."""
