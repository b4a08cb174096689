// Starts Swagger UI. A file, because the page's Content-Security-Policy allows no inline scripts.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayRequestDuration: true,
  validatorUrl: null,
});
