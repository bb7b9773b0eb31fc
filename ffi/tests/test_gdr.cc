// libgdrapi as the engine uses it, against a stand-in library (standin/gdrapi.cc) that maps ordinary memory: every step
// that can be refused is named, and nothing is left behind.
#include "host/backends/gdr.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "check.h"

namespace {

constexpr const char* kStandIn = CLO_STANDIN_GDRAPI;
constexpr uint64_t kDevice = uint64_t{0x7f0000000000};  // never dereferenced
constexpr int64_t kPage = clo::GdrLibrary::kPage;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

int live() {
  void* library = dlopen(kStandIn, RTLD_NOW);
  CHECK(library != nullptr);
  const int n = reinterpret_cast<int (*)()>(dlsym(library, "standin_gdr_live"))();
  dlclose(library);
  return n;
}

template <typename Call>
std::string failure(Call call) {
  try {
    call();
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

void memory_is_mapped_and_given_back() {
  clo::GdrLibrary library(kStandIn);
  const auto first = library.map(kDevice, 4 * kPage), second = library.map(kDevice + 8 * kPage, kPage);
  CHECK(first->host() != second->host());
  std::memset(first->host(), 1, 4 * kPage);
  std::memset(second->host(), 2, kPage);
  CHECK(static_cast<char*>(first->host())[4 * kPage - 1] == 1);
  CHECK(live() == 5);
}

void every_refusal_is_named() {
  const struct {
    const char *step, *text;
  } refusals[] = {
      {"pin", "libgdrapi: gdr_pin_buffer refused: Cannot allocate memory"},
      {"map", "libgdrapi: gdr_map refused: "},
      {"info", "libgdrapi: gdr_get_info refused: Invalid argument"},
      {"address", "libgdrapi: gdr_get_info names another address"},
  };
  for (const auto& refusal : refusals) {
    setenv("STANDIN_GDR_REFUSE", refusal.step, 1);
    clo::GdrLibrary library(kStandIn);
    CHECK(contains(failure([&] { library.map(kDevice, kPage); }), refusal.text));
    CHECK(live() == 1);
    unsetenv("STANDIN_GDR_REFUSE");
    library.map(kDevice, kPage);  // and the next one works
  }
  setenv("STANDIN_GDR_REFUSE", "open", 1);
  CHECK(contains(failure([] { clo::GdrLibrary library(kStandIn); }), "gdr_open refused: no /dev/gdrdrv"));
  unsetenv("STANDIN_GDR_REFUSE");
}

void libraries_that_are_none_are_named() {
  CHECK(contains(failure([] { clo::GdrLibrary library("/nowhere/libgdrapi.so"); }),
                 "no libgdrapi: /nowhere/libgdrapi.so: cannot open shared object file"));
  CHECK(contains(failure([] { clo::GdrLibrary library("libc.so.6"); }), "libgdrapi: libc.so.6 has no gdr_open"));
  setenv("CLO_JAX_GDRAPI", "/nowhere/else.so", 1);
  CHECK(contains(failure([] { clo::GdrLibrary library; }), "no libgdrapi: /nowhere/else.so"));
  setenv("CLO_JAX_GDRAPI", kStandIn, 1);
  clo::GdrLibrary library;
  CHECK(library.map(kDevice, kPage)->host() != nullptr);
}

void odd_pages_are_refused() {
  clo::GdrLibrary library(kStandIn);
  bool refused = false;
  try {
    library.map(kDevice + 4096, kPage);
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  memory_is_mapped_and_given_back();
  every_refusal_is_named();
  libraries_that_are_none_are_named();
  odd_pages_are_refused();
  CHECK(live() == 0);
  std::puts("ok");
}
